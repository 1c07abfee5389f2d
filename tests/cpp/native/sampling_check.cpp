// Rows of scores, distributions, verdicts and processors, held to Python's numbers.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <stdexcept>

#include "native/check.hpp"
#include "native/numbers.hpp"
#include "native/sampling/distribution.hpp"
#include "native/sampling/processors.hpp"
#include "native/speculation/target.hpp"

namespace specrt::checks {

namespace {

using native::Distribution;
using native::Json;

int check_noise(const native::Json& vectors) {
  int wrong = 0;
  for (const native::Json& vector : vectors.at("numbers").items()) {
    const native::Noise noise = noise_of(vector);
    const auto purpose = static_cast<native::Purpose>(vector.at("purpose").integer());
    const std::uint64_t position = whole_of(vector.at("position"));
    const Token token = vector.at("token").integer();
    const std::string what = "position " + std::to_string(position);
    wrong +=
        close(what, noise.exponential(purpose, position, token), vector.at("exponential").number());
    const double uniform = vector.at("uniform").number();
    wrong += close(what, noise.stream(purpose, position).uniform(token), uniform);
    if (token == 0 && noise.uniform(purpose, position) != uniform)
      wrong += differs(what, shown(noise.uniform(purpose, position)), shown(uniform));
  }
  return wrong;
}

std::uint64_t hash_of(const std::vector<Token>& ids) {
  std::uint64_t hash = 0xCBF29CE484222325;
  for (const Token id : ids) hash = (hash ^ static_cast<std::uint64_t>(id)) * 0x100000001B3;
  return hash;
}

int compare(const std::string& what, const Json& expected, const Distribution& found) {
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

int compare(const std::string& what, const Json& expected, const native::Ranked& found) {
  int wrong = same(what + ", token", found.token, expected.at("token").integer());
  wrong += close(what, found.logprob, number_of(expected.at("logprob")));
  wrong += same(what + ", rank", found.rank, size_of(expected.at("rank")));
  wrong += same(what + ", likeliest", found.ids, tokens_of(expected.at("ids")));
  const std::vector<double> logprobs = numbers_of(expected.at("logprobs"));
  wrong += same(what + ", logprobs", found.logprobs.size(), logprobs.size());
  for (std::size_t i = 0; wrong == 0 && i < logprobs.size(); ++i)
    wrong += close(what + ", a likeliest", found.logprobs[i], logprobs[i]);
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

std::vector<Distribution> distributions_of(const Json& values) {
  std::vector<Distribution> found;
  for (const Json& value : values.items()) found.push_back(distribution_of(value));
  return found;
}

int compare(const std::string& what, const native::Verdict& found, const Json& expected) {
  return same(what + ", accepted", found.accepted, size_of(expected.at("accepted"))) +
         same(what + ", next", found.next, expected.at("next").integer());
}

int check_match(const Json& vector) {
  const std::vector<Token> choices = tokens_of(vector.at("choices"));
  const auto choose = [&](std::size_t i) { return choices.at(i); };
  return compare("match", native::match(tokens_of(vector.at("drafted")), choose), vector);
}

int check_rejection(const Json& vector) {
  native::Proposal proposal;
  proposal.tokens = tokens_of(vector.at("tokens"));
  proposal.distributions = distributions_of(vector.at("distributions"));
  const std::vector<Distribution> targets = distributions_of(vector.at("targets"));
  const std::size_t position = size_of(vector.at("position"));
  const auto target = [&](std::size_t i) { return targets.at(i); };
  const native::Verdict found = native::rejection(proposal, target, noise_of(vector), position);
  return compare("rejection at " + std::to_string(position), found, vector);
}

int check_residual(const Json& vector) {
  const Distribution target = distribution_of(vector.at("target"));
  const Json& drafted = vector.at("draft");
  const Distribution draft = drafted.is_null() ? Distribution{} : distribution_of(drafted);
  const Distribution found =
      native::residual(target, drafted.is_null() ? nullptr : &draft, vector.at("token").integer());
  const Distribution expected = distribution_of(vector);
  int wrong = same("residual", found.ids, expected.ids);
  for (std::size_t i = 0; wrong == 0 && i < expected.ids.size(); ++i)
    wrong += close("residual", found.probs[i], expected.probs[i]);
  return wrong;
}

int check_draws(const Json& vector) {
  const std::vector<float> row = row_of(vector.at("row"));
  const Distribution found =
      native::process(row.data(), row.size(), params_of(vector.at("params")));
  const native::Noise noise = noise_of(vector);
  std::size_t position = size_of(vector.at("first"));
  std::vector<Token> drawn;
  for (std::size_t i = 0; i < vector.at("tokens").items().size(); ++i)
    drawn.push_back(found.draw(noise, native::Purpose::kToken, position++));
  return same("draws", drawn, tokens_of(vector.at("tokens")));
}

int check_verify(const native::Json& vectors) {
  int wrong = 0;
  for (const Json& vector : vectors.at("matches").items()) wrong += check_match(vector);
  for (const Json& vector : vectors.at("rejections").items()) wrong += check_rejection(vector);
  for (const Json& vector : vectors.at("residuals").items()) wrong += check_residual(vector);
  for (const Json& vector : vectors.at("draws").items()) wrong += check_draws(vector);
  return wrong;
}

// What vectors call the processors of an application by. Python's are in tests/cpp/sampling.py.
const std::map<std::string, specrt_processor> kProcessors = {
    {"halve",
     [](void*, const std::int64_t*, std::size_t, float* scores, std::size_t size) {
       for (std::size_t i = 0; i < size; ++i) scores[i] *= 0.5F;
       return 0;
     }},
    {"lean",
     [](void*, const std::int64_t* ids, std::size_t count, float* scores, std::size_t size) {
       const std::int64_t sum = std::accumulate(ids, ids + count, std::int64_t{0});
       scores[count % size] += 0.25F * static_cast<float>(sum % 7);
       scores[static_cast<std::size_t>(ids[count - 1])] = -std::numeric_limits<float>::infinity();
       return 0;
     }},
    {"nothing",
     [](void*, const std::int64_t*, std::size_t, float* scores, std::size_t) {
       scores[0] = std::numeric_limits<float>::quiet_NaN();
       return 0;
     }},
    {"boundless",
     [](void*, const std::int64_t*, std::size_t, float* scores, std::size_t size) {
       scores[size - 1] = std::numeric_limits<float>::infinity();
       return 0;
     }},
    {"refuse", [](void*, const std::int64_t*, std::size_t, float*, std::size_t) { return 3; }},
    {"raise", [](void*, const std::int64_t*, std::size_t, float*, std::size_t) -> std::int32_t {
       throw std::runtime_error("the application gave up");
     }}};

std::unique_ptr<native::LogitsProcessors> build_processors(const Json& vector) {
  const Json& spelled = vector.at("spelled");
  const auto spell = [&spelled](const std::string& word) { return tokens_of(spelled.at(word)); };
  const Json& fields = vector.at("params");
  Params params = params_of(fields);
  if (const Json* const names = fields.find("processors"))
    for (const std::string& name : texts_of(*names))
      params.processors.push_back({kProcessors.at(name), nullptr});
  return native::build_processors(params, spell, tokens_of(vector.at("ends")),
                                  size_of(vector.at("vocabulary")));
}

int compare(const std::string& what, const Json& step, native::LogitsProcessors& rules) {
  const std::vector<float> row = row_of(step);
  const std::vector<Token> path = tokens_of(step.at("path"));
  const float* edited = rules.edit(row.data(), row.size(), path.data(), path.size());
  const std::vector<double> expected = numbers_of(step.at("edited"));
  int wrong = same(what + ", scores", row.size(), expected.size());
  for (std::size_t i = 0; wrong == 0 && i < row.size(); ++i) {
    const double found = static_cast<double>(edited[i]);
    if (found != expected[i])
      wrong += differs(what + ", token " + std::to_string(i), shown(found), shown(expected[i]));
  }
  return wrong;
}

int replay(const std::string& what, const Json& vector) {
  const auto rules = build_processors(vector);
  if (rules == nullptr) return vector.find("none") ? 0 : differs(what, "no rules", "rules");
  if (vector.find("none")) return differs(what, "rules", "no rules");
  int wrong = 0;
  int number = 0;
  for (const Json& step : vector.at("steps").items()) {
    rules->learn(tokens_of(step.at("text")));
    wrong += compare(what + ", step " + std::to_string(number++), step, *rules);
  }
  return wrong;
}

int check_failure(const std::string& what, const Json& vector) {
  const std::string said = vector.at("message").text();
  try {
    replay(what, vector);
  } catch (const Failure& failure) {
    const bool told = std::string(failure.what()).find(said) != std::string::npos;
    return (told ? 0 : differs(what, failure.what(), said)) +
           same(what + ", status", static_cast<std::uint64_t>(failure.status()),
                size_of(vector.at("status")));
  }
  return differs(what, "rules", said);
}

int check_likeliest(const Json& vector) {
  const std::vector<float> row = row_of(vector);
  const Json& token = vector.at("token");
  try {
    const Token found = native::likeliest(row.data(), row.size());
    if (!token.is_null()) return same("likeliest", found, token.integer());
    return differs("likeliest", std::to_string(found), "a failure");
  } catch (const Failure& failure) {
    const bool told = token.is_null() && failure.status() == SPECRT_INVALID_ARGUMENT;
    return told ? 0 : differs("likeliest", failure.what(), "a token");
  }
}

int check_rules(const Json& vectors) {
  int wrong = 0;
  int number = 0;
  for (const Json& vector : vectors.at("cases").items()) {
    const std::string what = "case " + std::to_string(number++);
    wrong += vector.find("status") ? check_failure(what, vector) : replay(what, vector);
  }
  for (const Json& vector : vectors.at("likeliest").items()) wrong += check_likeliest(vector);
  return wrong;
}

const Registered kNoise("noise", check_noise);
const Registered kSampling("sampling", check_sampling);
const Registered kLogprobs("logprobs", check_logprobs);
const Registered kVerify("verify", check_verify);
const Registered kRules("rules", check_rules);

}  // namespace

}  // namespace specrt::checks
