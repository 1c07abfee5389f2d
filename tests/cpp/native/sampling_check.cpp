#include "native/check.hpp"
#include "native/numbers.hpp"

namespace specrt::checks {

using native::Distribution;
using native::Json;

static std::uint64_t hash_of(const std::vector<Token>& ids) {
  std::uint64_t hash = 0xCBF29CE484222325;
  for (const Token id : ids) hash = (hash ^ static_cast<std::uint64_t>(id)) * 0x100000001B3;
  return hash;
}

static int compare(const std::string& what, const Json& expected, const Distribution& found) {
  int wrong = same(what + ", tokens", found.ids.size(), size_of(expected.at("count")));
  wrong += same(what + ", hash of ids", hash_of(found.ids), whole_of(expected.at("hash")));
  if (wrong != 0) return wrong;
  for (const Json& place : expected.at("places").items()) {
    const std::size_t at = size_of(place.items()[0]);
    const std::string where = what + ", place " + std::to_string(at);
    wrong += same(where, found.ids[at], place.items()[1].integer());
    wrong += close(where, found.probs[at], number_of(place.items()[2]));
    wrong += close(where + " by its id", found.prob(found.ids[at]), found.probs[at]);
  }
  const std::uint64_t position = size_of(expected.at("position"));
  const native::Noise noise(position);
  const std::vector<Token> draws = tokens_of(expected.at("draws"));
  for (std::size_t i = 0; i < draws.size(); ++i) {
    const Token drawn = found.draw(noise, static_cast<native::Purpose>(i), position + i);
    wrong += same(what + ", draw", drawn, draws[i]);
  }
  return wrong;
}

int check_sampling(const Json& vectors) {
  int wrong = 0;
  int number = 0;
  for (const Json& vector : vectors.at("cases").items()) {
    const std::string what = "case " + std::to_string(number++);
    const std::vector<float> row = row_of(vector.at("row"));
    const bool fails = vector.find("fails") != nullptr;
    try {
      const Distribution found = native::process(
          row.data(), row.size(), params_of(vector.at("params")), number_of(vector.at("reach")));
      wrong += fails ? differs(what, "a distribution", "a failure") : compare(what, vector, found);
    } catch (const Failure& failure) {
      const bool told = fails && failure.status() == SPECRT_ENGINE;
      wrong += told ? 0 : differs(what, failure.what(), fails ? "SPECRT_ENGINE" : "tokens");
    }
  }
  return wrong;
}

static const Registered kRegistered("sampling", check_sampling);

}  // namespace specrt::checks
