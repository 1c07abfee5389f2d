#include "speculation/acceptance.hpp"

#include <algorithm>
#include <cmath>

#include "speculation/costs.hpp"

namespace specrt::speculation {

// The power of its odds that a level weighs at first.
constexpr double kHope = 0.15;

Acceptance::Acceptance(std::size_t most)
    : weights_{1.0, 1.0, 0.0},
      seen_{kTrust, kTrust, 4 * kTrust},
      ease_(most),
      reach_(most + 1, 1.0),
      tokens_(most + 1, 1.0) {
  // Compilers round exponentials that they know in a way of their own.
  volatile double level = -4.0;
  double total = 0;
  for (std::size_t i = 0; i < kLevels; ++i, level = level + 1.0) {
    odds_[i] = std::exp(level);
    total += belief_[i] = std::pow(odds_[i], kHope);
  }
  for (double& share : belief_) share /= total;
  usual_ = belief_;
  for (std::size_t n = 1; n <= most; ++n) {
    Belief& powers = powers_.emplace_back();
    for (std::size_t i = 0; i < kLevels; ++i) {
      powers[i] = std::pow(odds_[i] / (1.0 + odds_[i]), static_cast<double>(n));
    }
  }
  mix_with_usual(0);
}

double Acceptance::expect(std::size_t place, double confidence) {
  double surer = 0;
  if (confidence > 0 && confidence < 1) {
    surer = std::log(confidence / (1.0 - confidence)) - mean_;
    mean_ += kRecent * surer;
    has_confidence_ = true;
  }
  const double depth = std::log1p(static_cast<double>(place));
  const Features features{std::max(0.0, surer), std::min(0.0, surer), depth};
  drafted_.push_back(features);
  return 1.0 - 1.0 / (1.0 + times(features) * ease_.at(place));
}

// By how much these features multiply the odds of a token.
double Acceptance::times(const Features& features) const {
  const double log_odds =
      features[0] * weights_[0] + features[1] * weights_[1] + features[2] * weights_[2];
  return std::exp(std::max(-8.0, std::min(8.0, log_odds)));
}

void Acceptance::learn(std::size_t accepted, std::size_t evaluated) {
  while (drafted_.size() < evaluated) expect(drafted_.size(), 1.0);
  for (std::size_t place = 0; place < evaluated; ++place) {
    judge(drafted_[place], ease_.at(place), place < accepted);
  }
  weights_[2] = std::min(0.0, weights_[2]);
  double total = 0;
  for (const double share : belief_) total += share;
  for (std::size_t i = 0; i < kLevels; ++i) {
    belief_[i] /= total;
    usual_[i] += kSwitchChance * (belief_[i] - usual_[i] + 1.0 / kLevels - usual_[i]);
  }
  mix_with_usual(kSwitchChance);
}

// Learn what became of one token.
void Acceptance::judge(const Features& features, double ease, bool right) {
  const double factor = times(features), scale = factor + 1.0 / odds_.back();
  for (std::size_t i = 0; i < kLevels; ++i) {
    const double kept = right ? belief_[i] * odds_[i] * scale : belief_[i];
    belief_[i] = kept / (1.0 + factor * odds_[i]);
  }
  const double chance = 1.0 - 1.0 / (1.0 + factor * ease);
  for (std::size_t i = 0; i < features.size(); ++i) {
    if (features[i] == 0) continue;
    seen_[i] += chance * (1.0 - chance) * features[i] * features[i];
    weights_[i] += (right - chance) * features[i] / seen_[i];
  }
}

void Acceptance::mix_with_usual(double chance) {
  for (std::size_t i = 0; i < kLevels; ++i) belief_[i] += chance * (usual_[i] - belief_[i]);
  double before = 1;
  for (std::size_t place = 0; place < ease_.size(); ++place) {
    double kept = 0;
    for (std::size_t i = 0; i < kLevels; ++i) kept += belief_[i] * powers_[place][i];
    ease_[place] = kept / (before - kept);
    before = kept;
    const double odds = ease_[place] * std::pow(static_cast<double>(place + 1), weights_[2]);
    reach_[place + 1] = reach_[place] * (odds / (1.0 + odds));
    tokens_[place + 1] = tokens_[place] + reach_[place + 1];
  }
}

}  // namespace specrt::speculation
