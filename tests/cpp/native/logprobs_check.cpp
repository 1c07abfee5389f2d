#include "native/check.hpp"
#include "native/logprobs.hpp"
#include "native/numbers.hpp"

namespace specrt::checks {

using native::Json;

static int compare(const std::string& what, const Json& expected, const native::Ranked& found) {
  int wrong = same(what + ", token", found.token, expected.at("token").integer());
  wrong += close(what, found.logprob, number_of(expected.at("logprob")));
  wrong += same(what + ", rank", found.rank, size_of(expected.at("rank")));
  wrong += same(what + ", likeliest", found.ids, tokens_of(expected.at("ids")));
  const std::vector<double> logprobs = numbers_of(expected.at("logprobs"));
  wrong += same(what + ", logprobs", found.logprobs.size(), logprobs.size());
  for (std::size_t i = 0; wrong == 0 && i < logprobs.size(); ++i) {
    wrong += close(what + ", a likeliest", found.logprobs[i], logprobs[i]);
  }
  return wrong;
}

int check_logprobs(const native::Json& vectors) {
  int wrong = 0;
  int number = 0;
  for (const Json& vector : vectors.at("cases").items()) {
    const std::string what = "case " + std::to_string(number++);
    const std::vector<float> row = row_of(vector.at("row"));
    const bool fails = vector.find("fails") != nullptr;
    try {
      const native::Ranked found = native::ranked(
          row.data(), row.size(), vector.at("token").integer(), size_of(vector.at("k")));
      wrong += fails ? differs(what, "ranks", "a failure") : compare(what, vector, found);
    } catch (const Failure& failure) {
      if (!fails) wrong += differs(what, failure.what(), "ranks");
    }
  }
  return wrong;
}

static const Registered kRegistered("logprobs", check_logprobs);

}  // namespace specrt::checks
