// Noise, distributions, verdicts, and edits of scores.
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>

#include "native/answers.hpp"
#include "native/sampling/distribution.hpp"
#include "native/sampling/processors.hpp"
#include "native/speculation/target.hpp"

namespace specrt::checks {

namespace {

using native::Distribution;
using Scores = std::vector<float>;

Distribution distribution_of(const Json& pair) {
  return {tokens_of(pair, "ids"), get<std::vector<double>>(pair, "probs")};
}

std::vector<Distribution> distributions_of(const Json& pairs) {
  std::vector<Distribution> found;
  for (const Json& pair : pairs.items()) found.push_back(distribution_of(pair));
  return found;
}

// A distribution, the chance of a token by its id, and what is drawn for each purpose.
std::string process(const Json& call) {
  const auto row = get<Scores>(call, "scores");
  const Distribution found = native::process(row.data(), row.size(), params_of(call.at("params")),
                                             get<double>(call, "reach"));
  const auto position = get<std::size_t>(call, "position");
  const native::Noise noise(position);
  std::vector<Token> draws;
  for (std::size_t i = 0; i < 4; ++i)
    draws.push_back(found.draw(noise, static_cast<native::Purpose>(i), position + i));
  return object({{"ids", json(found.ids)},
                 {"probs", json(found.probs)},
                 {"draws", json(draws)},
                 {"chance", json(found.prob(draws[0]))}});
}

std::string ranked(const Json& call) {
  const auto row = get<Scores>(call, "scores");
  const native::Ranked found = native::ranked(row.data(), row.size(), get<Token>(call, "token"),
                                              get<std::size_t>(call, "k"));
  return object({{"token", json(found.token)},
                 {"logprob", json(found.logprob)},
                 {"rank", json(found.rank)},
                 {"ids", json(found.ids)},
                 {"logprobs", json(found.logprobs)}});
}

std::string likeliest(const Json& call) {
  const auto row = get<Scores>(call, "scores");
  return json(native::likeliest(row.data(), row.size()));
}

std::string rejection(const Json& call) {
  native::Proposal proposal;
  proposal.tokens = tokens_of(call, "drafted");
  proposal.distributions = distributions_of(call.at("distributions"));
  const std::vector<Distribution> targets = distributions_of(call.at("targets"));
  const auto target = [&](std::size_t i) { return targets.at(i); };
  const native::Noise noise(get<std::uint64_t>(call, "seed"), get<std::uint64_t>(call, "request"));
  const native::Verdict found =
      native::rejection(proposal, target, noise, get<std::size_t>(call, "position"));
  return json(std::vector<Token>{static_cast<Token>(found.accepted), found.next});
}

std::string residual(const Json& call) {
  const std::vector<Distribution> draft = distributions_of(call.at("draft"));
  const Distribution found =
      native::residual(distribution_of(call.at("target")), draft.empty() ? nullptr : draft.data(),
                       get<Token>(call, "token"));
  return object({{"ids", json(found.ids)}, {"probs", json(found.probs)}});
}

// A processor of an application, by its name; Python's are in tests/cpp/sampling.py.
std::int32_t edit(void* user, const std::int64_t* ids, std::size_t count, float* scores,
                  std::size_t size) {
  const std::string& name = *static_cast<const std::string*>(user);
  if (name == "halve")
    for (std::size_t i = 0; i < size; ++i) scores[i] *= 0.5F;
  if (name == "lean") {
    const std::int64_t sum = std::accumulate(ids, ids + count, std::int64_t{0});
    scores[count % size] += 0.25F * static_cast<float>(sum % 7);
    scores[static_cast<std::size_t>(ids[count - 1])] = -std::numeric_limits<float>::infinity();
  }
  return name == "refuse" ? 3 : 0;
}

// Rows after a text that grows, edited; nothing where the request asks for no edits.
std::string edited(const Json& call) {
  auto names = get<std::vector<std::string>>(call, "processors");
  Params params = params_of(call.at("params"));
  for (std::string& name : names) params.processors.push_back({edit, &name});
  const auto spell = [&](const std::string& word, bool middle) {
    return tokens_of(call.at("spelled"), ((middle ? "\n" : "") + word).c_str());
  };
  const auto rules = native::build_processors(params, spell, tokens_of(call, "ends"),
                                              get<std::size_t>(call, "vocabulary"));
  if (rules == nullptr) return "null";
  std::vector<std::string> rows;
  for (const Json& step : call.at("steps").items()) {
    const auto row = get<Scores>(step, "scores");
    const std::vector<Token> path = tokens_of(step, "path");
    rules->learn(tokens_of(step, "text"));
    const float* const found = rules->edit(row.data(), row.size(), path.data(), path.size());
    rows.push_back(json(Scores(found, found + row.size())));
  }
  return list(rows);
}

const Registered kSampling({{"process", process},
                            {"ranked", ranked},
                            {"likeliest", likeliest},
                            {"rejection", rejection},
                            {"residual", residual},
                            {"edited", edited}});

}  // namespace

}  // namespace specrt::checks
