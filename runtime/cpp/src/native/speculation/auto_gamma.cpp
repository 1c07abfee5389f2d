#include "native/speculation/auto_gamma.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "native/text/json.hpp"

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
      ease_(most),
      reach_(most + 1, 1.0),
      tokens_(most + 1, 1.0) {
  double total = 0;
  for (std::size_t i = 0; i < kLevels; ++i) {
    odds_[i] = std::exp(static_cast<double>(i) - 4.0);
    total += belief_[i] = std::pow(odds_[i], kHope);
  }
  for (double& share : belief_) share /= total;
  usual_ = belief_;
  mix_with_usual(0);
}

double Acceptance::expect(std::size_t place, double confidence) {
  double surer = 0;
  if (confidence > 0 && confidence < 1) {
    surer = std::log(confidence / (1 - confidence)) - mean_;
    mean_ += kRecent * surer;
    has_confidence_ = true;
  }
  const double depth = std::log1p(static_cast<double>(place));
  const Features features{std::max(0.0, surer), std::min(0.0, surer), depth};
  drafted_.push_back(features);
  return 1 - 1 / (1 + times(features) * ease_[place]);
}

// By how much these features multiply the odds of a token.
double Acceptance::times(const Features& features) const {
  double log_odds = 0;
  for (std::size_t i = 0; i < features.size(); ++i) log_odds += weights_[i] * features[i];
  return std::exp(std::clamp(log_odds, -8.0, 8.0));
}

void Acceptance::learn(std::size_t accepted, std::size_t evaluated) {
  while (drafted_.size() < evaluated) expect(drafted_.size(), 1.0);
  for (std::size_t place = 0; place < evaluated; ++place) {
    const Features& features = drafted_[place];
    const double factor = times(features), chance = 1 - 1 / (1 + factor * ease_[place]);
    const bool right = place < accepted;
    const double scale = factor + 1 / odds_.back();  // 1 for the easiest, see Python's
    for (std::size_t i = 0; i < kLevels; ++i) {
      belief_[i] *= (right ? odds_[i] * scale : 1) / (1 + factor * odds_[i]);
    }
    for (std::size_t i = 0; i < features.size(); ++i) {
      seen_[i] += chance * (1 - chance) * features[i] * features[i];
      weights_[i] += (right - chance) * features[i] / seen_[i];
    }
  }
  weights_[2] = std::min(0.0, weights_[2]);
  const double total = std::accumulate(belief_.begin(), belief_.end(), 0.0);
  for (std::size_t i = 0; i < kLevels; ++i) {
    belief_[i] /= total;
    const double changes = belief_[i] - usual_[i] + 1.0 / kLevels - usual_[i];
    usual_[i] += kSwitchChance * changes;
  }
  mix_with_usual(kSwitchChance);
}

void Acceptance::mix_with_usual(double chance) {
  for (std::size_t i = 0; i < kLevels; ++i) belief_[i] += chance * (usual_[i] - belief_[i]);
  Belief belief = belief_;
  double before = 1;
  for (std::size_t place = 0; place < ease_.size(); ++place) {
    double kept = 0;
    for (std::size_t i = 0; i < kLevels; ++i) kept += belief[i] *= odds_[i] / (1 + odds_[i]);
    ease_[place] = kept / (before - kept);
    before = kept;
    const double odds = ease_[place] * std::pow(static_cast<double>(place + 1), weights_[2]);
    reach_[place + 1] = reach_[place] * odds / (1 + odds);
    tokens_[place + 1] = tokens_[place] + reach_[place + 1];
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
  probing_ = false;
  joint_acceptance_ = 1;
  steps_ = 0;
  acceptance_.begin();
  plan();
  // How sure the drafter is of a first token is worth a look before it is given up.
  if (gamma_ > 0 || (acceptance_.has_confidence() && pays(0))) {
    probe_loss_ = 0;
    return rounds_drafted_ >= kMaxDrafting && !rival_ ? 0 : static_cast<int>(most_);
  }
  if (most_ == 0) return 0;
  const double loss = total_[1] * floor_ - acceptance_.tokens()[1];  // expected of a probe
  probing_ = static_cast<double>(rounds_idle_) * kProbing >=
             std::max(probe_loss_, std::min(kMaxProbeLoss, loss));
  return probing_ ? 1 : 0;
}

DraftDecision AutoGamma::decide(int drafted, double confidence) {
  steps_ = static_cast<std::size_t>(drafted);
  joint_acceptance_ *= acceptance_.expect(steps_ - 1, confidence);
  if (probing_ || pays(steps_)) return DraftDecision::kContinue;
  const std::vector<double>& verify = verify_->costs();
  const bool verified = joint_acceptance_ >= rate_ * (verify[steps_] - verify[steps_ - 1]);
  return verified ? DraftDecision::kStop : DraftDecision::kDiscard;
}

void AutoGamma::observe(const Round& round) {
  if (round.drafted > 0) return judge(round);
  ++rounds_idle_;
  tokens_since_draft_ += round.tokens.size();
  if (!rival_) {
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
    probe_loss_ = std::min(kMaxProbeLoss, spent - acceptance_.tokens()[1]);
  } else {
    tokens_since_draft_ = 0;
  }
}

// Find the best number of tokens to draft, and its rate, as costs and the text are now.
void AutoGamma::plan() {
  const std::vector<double>&verify = verify_->costs(), &draft = draft_.costs();
  total_.clear();
  for (std::size_t g = 0; g <= most_; ++g) total_.push_back(verify[g] + draft[g] + outside_);
  floor_ = 1 / total_[0];
  if (rival_) floor_ = std::max(floor_, rival_->rate());
  gamma_ = 0;
  rate_ = floor_;
  for (std::size_t g = 1; g <= most_; ++g) {
    const double rate = acceptance_.tokens()[g] / total_[g];
    if (rate > rate_) {
      gamma_ = g;
      rate_ = rate;
    }
  }
}

// Whether the next token, or those up to the best gamma, are worth their time.
bool AutoGamma::pays(std::size_t drafted) const {
  if (drafted == most_) return false;
  const std::vector<double>& tokens = acceptance_.tokens();
  const double worth = rate_ * acceptance_.reach()[drafted];
  for (const std::size_t end : {drafted + 1, std::max(drafted + 1, gamma_)}) {
    const double gained = tokens[end] - tokens[drafted], ns = total_[end] - total_[drafted];
    if (joint_acceptance_ * gained >= worth * ns) return true;
  }
  return false;
}

std::optional<std::string> AutoGamma::fallback(std::size_t after) const {
  if (tokens_since_draft_ < after || most_ == 0) return std::nullopt;
  if (gamma_ > 0) return "nothing was found to propose";
  return "a round that drafts one token takes " + decimal(total_[1] * floor_, 2) +
         " times as long as a token without it, and " + decimal(acceptance_.tokens()[1], 2) +
         " tokens are expected of it";
}

}  // namespace specrt::native
