#include "native/check.hpp"
#include "native/numbers.hpp"
#include "native/verify.hpp"

namespace specrt::checks {

using native::Distribution;
using native::Json;

static std::vector<Distribution> distributions_of(const Json& values) {
  std::vector<Distribution> found;
  for (const Json& value : values.items()) found.push_back(distribution_of(value));
  return found;
}

static int compare(const std::string& what, const native::Verdict& found, const Json& expected) {
  return same(what + ", accepted", found.accepted, size_of(expected.at("accepted"))) +
         same(what + ", next", found.next, expected.at("next").integer());
}

static int check_match(const Json& vector) {
  const std::vector<Token> choices = tokens_of(vector.at("choices"));
  const auto choose = [&](std::size_t i) { return choices.at(i); };
  return compare("match", native::match(tokens_of(vector.at("drafted")), choose), vector);
}

static int check_rejection(const Json& vector) {
  native::Proposal proposal;
  proposal.tokens = tokens_of(vector.at("tokens"));
  proposal.distributions = distributions_of(vector.at("distributions"));
  const std::vector<Distribution> targets = distributions_of(vector.at("targets"));
  const std::size_t position = size_of(vector.at("position"));
  const auto target = [&](std::size_t i) { return targets.at(i); };
  const native::Verdict found = native::rejection(proposal, target, noise_of(vector), position);
  return compare("rejection at " + std::to_string(position), found, vector);
}

static int check_residual(const Json& vector) {
  const Distribution target = distribution_of(vector.at("target"));
  const Json& drafted = vector.at("draft");
  const Distribution draft = drafted.is_null() ? Distribution{} : distribution_of(drafted);
  const Distribution found =
      native::residual(target, drafted.is_null() ? nullptr : &draft, vector.at("token").integer());
  const Distribution expected = distribution_of(vector);
  int wrong = same("residual", found.ids, expected.ids);
  for (std::size_t i = 0; wrong == 0 && i < expected.ids.size(); ++i) {
    wrong += close("residual", found.probs[i], expected.probs[i]);
  }
  return wrong;
}

static int check_draws(const Json& vector) {
  const std::vector<float> row = row_of(vector.at("row"));
  const Distribution found =
      native::process(row.data(), row.size(), params_of(vector.at("params")));
  const native::Noise noise = noise_of(vector);
  std::size_t position = size_of(vector.at("first"));
  std::vector<Token> drawn;
  for (std::size_t i = 0; i < vector.at("tokens").items().size(); ++i) {
    drawn.push_back(found.draw(noise, native::Purpose::kToken, position++));
  }
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

static const Registered kRegistered("verify", check_verify);

}  // namespace specrt::checks
