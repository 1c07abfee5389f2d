#include "native/speculation/auto_gamma.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <utility>

namespace specrt::native {

// The Python runtime's constants, and its reasons for them.
constexpr double kSwitchChance = 0.01;
constexpr double kHope = 0.15;
constexpr double kProbing = 0.015;
constexpr double kMaxProbeLoss = 8.0;
constexpr std::int64_t kMaxDrafting = 200;

Acceptance::Acceptance(std::size_t most)
    : weights_{1.0, 1.0, 0.0},
      seen_{kTrust, kTrust, 4 * kTrust},
      log_odds_(std::max<std::size_t>(1, most)) {
  double total = 0;
  for (std::size_t i = 0; i < kLevels; ++i) {
    odds_[i] = std::exp(static_cast<double>(i) - 4.0);
    total += belief_[i] = std::pow(odds_[i], kHope);
  }
  for (double& share : belief_) share /= total;
  usual_ = belief_;
  mix_with_usual(0);
}

// By how much these features multiply the odds of a token.
double Acceptance::odds(const Features& features) const {
  double log_odds = 0;
  for (std::size_t i = 0; i < features.size(); ++i) log_odds += weights_[i] * features[i];
  return std::exp(std::clamp(log_odds, -8.0, 8.0));
}

double Acceptance::chance(std::size_t place, double odds) const {
  return 1 - 1 / (1 + odds * std::exp(log_odds_[place]));
}

double Acceptance::chance(std::size_t place) const {
  return chance(place, odds({0, 0, std::log1p(static_cast<double>(place))}));
}

double Acceptance::expect(std::size_t place, double confidence) {
  double surer = 0;
  if (confidence > 0 && confidence < 1) {
    surer = std::log(confidence / (1 - confidence)) - mean_;
    mean_ += kRecent * surer;
    has_confidence_ = true;
  }
  const double depth = std::log1p(static_cast<double>(place));
  tokens_.push_back({std::max(0.0, surer), std::min(0.0, surer), depth});
  return chance(place, odds(tokens_.back()));
}

void Acceptance::learn(std::size_t accepted, std::size_t evaluated) {
  while (tokens_.size() < evaluated) expect(tokens_.size(), 1.0);
  for (std::size_t place = 0; place < evaluated; ++place) {
    const Features& features = tokens_[place];
    const double right = place < accepted ? 1 : 0, sure = odds(features);
    for (std::size_t i = 0; i < kLevels; ++i) {
      const double odd = odds_[i] * sure;
      belief_[i] *= (place < accepted ? odd : 1) / (1 + odd);
    }
    const double expected = chance(place, sure);
    for (std::size_t i = 0; i < features.size(); ++i) {
      seen_[i] += expected * (1 - expected) * features[i] * features[i];
      weights_[i] += (right - expected) * features[i] / seen_[i];
    }
  }
  weights_[2] = std::min(0.0, weights_[2]);
  const double total = std::accumulate(belief_.begin(), belief_.end(), 0.0);
  for (std::size_t i = 0; i < kLevels; ++i) {
    belief_[i] /= total;
    usual_[i] += kSwitchChance * (belief_[i] - usual_[i]);
    usual_[i] += kSwitchChance * (1.0 / kLevels - usual_[i]);
  }
  mix_with_usual(kSwitchChance);
}

void Acceptance::mix_with_usual(double chance) {
  for (std::size_t i = 0; i < kLevels; ++i) belief_[i] += chance * (usual_[i] - belief_[i]);
  Belief belief = belief_;
  double before = 1;
  for (double& ease : log_odds_) {
    double kept = 0;
    for (std::size_t i = 0; i < kLevels; ++i) kept += belief[i] *= odds_[i] / (1 + odds_[i]);
    ease = std::log(kept / (before - kept));
    before = kept;
  }
}

static std::vector<double> table(int most, const Costs& costs, double (Costs::*cost)(int) const) {
  std::vector<double> values;
  for (int gamma = 0; gamma <= most; ++gamma) values.push_back((costs.*cost)(gamma));
  return values;
}

AutoGamma::AutoGamma(const Costs& costs, int most, std::shared_ptr<const AutoGamma> rival)
    : most_(static_cast<std::size_t>(most)),
      rival_(std::move(rival)),
      acceptance_(most_),
      verify_(rival_ ? rival_->verify_
                     : std::make_shared<CostTracker>(table(most, costs, &Costs::verify),
                                                     costs.assumed)),
      draft_(table(most, costs, &Costs::draft), costs.assumed),
      outside_(costs.outside_ns) {
  plan();
  bool pays = most_ == 0;  // with perfect drafts at least
  for (std::size_t g = 1; g <= most_; ++g) {
    pays = pays || static_cast<double>(g + 1) * total_[0] > total_[g];
  }
  if (!pays) tokens_since_draft_ = kFallbackAfter;
}

int AutoGamma::choose() {
  chose_ = true;
  probing_ = false;
  joint_acceptance_ = 1;
  steps_ = 0;
  acceptance_.begin();
  plan();
  // How sure the drafter is of a first token is worth a look before it is given up.
  if (gamma_ > 0 || (acceptance_.has_confidence() && min_to_draft_[0] <= 1)) {
    probe_loss_ = 0;
    return rounds_drafted_ >= kMaxDrafting && !rival_ ? 0 : static_cast<int>(most_);
  }
  if (most_ == 0) return 0;
  const double loss = total_[1] * floor_ - 1 - acceptance_.chance(0);  // expected of a probe
  probing_ = static_cast<double>(rounds_idle_) * kProbing >=
             std::max(probe_loss_, std::min(kMaxProbeLoss, loss));
  return probing_ ? 1 : 0;
}

DraftDecision AutoGamma::decide(int drafted, double confidence) {
  steps_ = static_cast<std::size_t>(drafted);
  joint_acceptance_ *= acceptance_.expect(steps_ - 1, confidence);
  if (probing_ || joint_acceptance_ >= min_to_draft_[steps_]) return DraftDecision::kContinue;
  return joint_acceptance_ >= min_to_verify_[steps_] ? DraftDecision::kStop
                                                     : DraftDecision::kDiscard;
}

void AutoGamma::observe(const Round& round) {
  const bool chose = std::exchange(chose_, false);
  if (round.drafted > 0) return judge(round);
  ++rounds_idle_;
  tokens_since_draft_ += round.tokens.size();
  if (chose && !rival_) {
    rounds_drafted_ = 0;
    verify_->record(0, static_cast<double>(round.verify_ns));
  }
}

// Learn from a round that this policy drafted in.
void AutoGamma::judge(const Round& round) {
  if (probing_ && round.accepted > 0) {
    acceptance_.mix_with_usual(1 - std::pow(1 - kSwitchChance, static_cast<double>(rounds_idle_)));
  }
  acceptance_.learn(round.accepted, round.evaluated());
  verify_->record(round.drafted, static_cast<double>(round.verify_ns));
  if (!round.caught_up) {
    draft_.record(steps_ > 0 ? steps_ : round.drafted, static_cast<double>(round.draft_ns));
  }
  ++rounds_drafted_;
  rounds_idle_ = 0;
  if (probing_) {
    const double spent = static_cast<double>(round.draft_ns + round.verify_ns) * floor_;
    probe_loss_ = std::min(kMaxProbeLoss, spent - 1 - acceptance_.chance(0));
  } else {
    tokens_since_draft_ = 0;
  }
}

// Find out how far to draft: how likely the tokens so far must be kept for another one, and how
// likely a token for it to be verified.
void AutoGamma::plan() {
  const std::vector<double> verify = verify_->costs(), draft = draft_.costs();
  std::vector<double> chances;
  total_.clear();
  for (std::size_t g = 0; g <= most_; ++g) {
    total_.push_back(verify[g] + draft[g] + outside_);
    if (g < most_) chances.push_back(acceptance_.chance(g));
  }
  floor_ = 1 / total_[0];
  if (rival_) floor_ = std::max(floor_, rival_->rate());
  gamma_ = 0;
  rate_ = floor_;
  double tokens = 1, reach = 1;
  for (std::size_t g = 1; g <= most_; ++g) {
    reach *= chances[g - 1];
    tokens += reach;
    if (tokens > rate_ * total_[g]) {
      gamma_ = g;
      rate_ = tokens / total_[g];
    }
  }
  min_to_verify_.assign(most_ + 1, 0);
  min_to_draft_.assign(most_ + 1, 2);  // a chance that no token has
  tokens = 0;
  for (std::size_t k = most_; k-- > 0;) {
    double ns = (total_[k + 1] - total_[k]) / chances[k];
    if (k < gamma_) {
      tokens = chances[k] * (1 + tokens);
      ns = std::min(ns, (total_[gamma_] - total_[k]) / tokens);
    }
    min_to_draft_[k] = rate_ * ns;
    min_to_verify_[k + 1] = rate_ * (verify[k + 1] - verify[k]);
  }
}

std::optional<std::string> AutoGamma::fallback(std::size_t after) const {
  if (tokens_since_draft_ < after || most_ == 0) return std::nullopt;
  if (gamma_ > 0) return "nothing was found to propose";
  char text[160];
  std::snprintf(text, sizeof text,
                "a round that drafts one token takes %.2f times as long as a token without it, "
                "and %.2f tokens are expected of it",
                total_[1] * floor_, 1 + acceptance_.chance(0));
  return std::string(text);
}

}  // namespace specrt::native
