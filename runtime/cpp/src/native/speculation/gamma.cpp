#include "native/speculation/gamma.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

namespace specrt::native {

// The Python runtime's constants, and its reasons for them.
constexpr double kTurn = 0.01;
constexpr double kSurer = 0.8;
constexpr double kTrust = 8.0;
constexpr double kRecent = 1.0 / 16;
constexpr double kProbing = 0.015;
constexpr double kDearest = 8.0;
constexpr std::int64_t kCheck = 200;
constexpr std::int64_t kSpared = 32;
constexpr std::size_t kSilent = 256;

BuiltGamma::BuiltGamma(std::shared_ptr<GammaPolicy> policy, std::vector<int> gammas)
    : policy_(std::move(policy)), gammas_(std::move(gammas)) {}

int BuiltGamma::choose() {
  const auto reaches = std::lower_bound(gammas_.begin(), gammas_.end(), policy_->choose());
  return reaches == gammas_.end() ? gammas_.back() : *reaches;
}

DraftDecision BuiltGamma::decide(int drafted, double confidence) {
  const DraftDecision weight = policy_->decide(drafted, confidence);
  const int kept = weight == DraftDecision::kDiscard ? drafted - 1 : drafted;
  return std::binary_search(gammas_.begin(), gammas_.end(), kept) ? weight
                                                                  : DraftDecision::kContinue;
}

void BuiltGamma::observe(const Round& round) { policy_->observe(round); }

// A chance by its log odds, never 0 or 1.
static double chance_of(double odds) {
  return 1.0 / (1.0 + std::exp(-std::clamp(odds, -12.0, 12.0)));
}

static double level(std::size_t index) { return static_cast<double>(index) - 4.0; }

Acceptance::Acceptance(std::size_t most)
    : weights_{kSurer, kSurer, 0.0}, seen_{kTrust, kTrust, 4 * kTrust}, eases_(most + 1) {
  belief_.fill(1.0 / kLevels);
  usual_ = belief_;
  turn(0);
}

double Acceptance::offset(const Features& features) const {
  return weights_[0] * features[0] + weights_[1] * features[1] + weights_[2] * features[2];
}

double Acceptance::spread() const { return weights_[0] * std::sqrt(variance_); }

double Acceptance::chance(std::size_t place) const {
  return chance_of(eases_[place] + weights_[2] * std::log1p(static_cast<double>(place)));
}

double Acceptance::expect(std::size_t place, double confidence) {
  double surer = 0;
  if (confidence > 0 && confidence < 1) {
    surer = std::log(confidence / (1 - confidence)) - mean_;
    mean_ += kRecent * surer;
    variance_ += kRecent * (surer * surer - variance_);
  }
  const double depth = std::log1p(static_cast<double>(place));
  tokens_.push_back({std::max(0.0, surer), std::min(0.0, surer), depth});
  return chance_of(eases_[place] + offset(tokens_.back()));
}

void Acceptance::learn(std::size_t accepted, std::size_t evaluated) {
  while (tokens_.size() < evaluated) expect(tokens_.size(), 1.0);
  for (std::size_t place = 0; place < evaluated; ++place) {
    const Features& features = tokens_[place];
    const bool right = place < accepted;
    const double off = offset(features);
    for (std::size_t i = 0; i < kLevels; ++i) {
      const double kept = chance_of(level(i) + off);
      belief_[i] *= right ? kept : 1 - kept;
    }
    const double chance = chance_of(eases_[place] + off);
    for (std::size_t i = 0; i < features.size(); ++i) {
      seen_[i] += chance * (1 - chance) * features[i] * features[i];
      weights_[i] += ((right ? 1 : 0) - chance) * features[i] / seen_[i];
    }
  }
  weights_[2] = std::min(0.0, weights_[2]);
  double total = 0;
  for (const double share : belief_) total += share;
  for (std::size_t i = 0; i < kLevels; ++i) {
    belief_[i] /= total;
    usual_[i] += kTurn * (belief_[i] - usual_[i]);
    usual_[i] += kTurn * (1.0 / kLevels - usual_[i]);
  }
  turn(kTurn);
}

void Acceptance::turn(double chance) {
  for (std::size_t i = 0; i < kLevels; ++i) belief_[i] += chance * (usual_[i] - belief_[i]);
  Belief belief = belief_;
  double before = 1;
  for (double& ease : eases_) {
    double left = 0;
    for (std::size_t i = 0; i < kLevels; ++i) left += belief[i] *= chance_of(level(i));
    ease = std::log(left / (before - left));
    before = left;
  }
}

CostTracker::CostTracker(std::vector<double> tuned) {
  for (const double ns : tuned) widths_.push_back({ns});
}

void CostTracker::record(std::size_t drafted, double ns) {
  Width& width = widths_.at(drafted);
  const double expected = width.ns * common_;
  if (ns <= 0 || expected <= 0) return;
  const double ratio = ns / expected;
  width.fast = ratio < 0.5 ? width.fast + 1 : 0;
  width.slow = ratio > 2.0 ? width.slow + 1 : 0;
  if (width.fast == 2 || width.slow == 4) {
    width.ns *= ratio;
    width.fast = width.slow = 0;
  } else if (ratio >= 0.5 && ratio <= 2.0) {
    const double surprise = std::min(0.5, ratio - 1.0);
    common_ *= 1.0 + surprise * std::max(1.0 / (1.0 + passes_), kRecent);
    width.ns *= 1.0 + surprise / (2 * kTrust + std::min<double>(width.passes, 8 * kTrust));
  }
  ++width.passes;
  ++passes_;
}

std::vector<double> CostTracker::costs() const {
  std::vector<double> costs;
  const auto timed = std::find_if(widths_.begin(), widths_.end(),
                                  [](const Width& width) { return width.passes > 0; });
  double most = timed == widths_.end() ? INFINITY : timed->ns;
  for (const Width& width : widths_) {
    if (width.passes > 0) most = width.ns;
    costs.push_back(common_ * std::min(width.ns, most));
  }
  return costs;
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
                     : std::make_shared<CostTracker>(table(most, costs, &Costs::verify))),
      draft_(table(most, costs, &Costs::draft)),
      outside_(costs.outside_ns) {
  plan();
  bool pays = most_ == 0;  // with perfect drafts at least
  for (std::size_t g = 1; g <= most_; ++g) {
    pays = pays || static_cast<double>(g + 1) * total_[0] > total_[g];
  }
  if (!pays) fallback_ = unprofitable();
}

int AutoGamma::choose() {
  asked_ = true;
  probing_ = false;
  reach_ = 1;
  steps_ = 0;
  acceptance_.begin();
  plan();
  if (gamma_ > 0 || more_[0] <= 1) {
    lost_ = 0;
    if (run_ >= kCheck && !rival_) return 0;
    return static_cast<int>(acceptance_.spread() > 0 ? most_ : gamma_);
  }
  probing_ = static_cast<double>(idle_) * kProbing >= std::max(lost_, loss());
  return probing_ && most_ > 0 ? 1 : 0;
}

DraftDecision AutoGamma::decide(int drafted, double confidence) {
  steps_ = static_cast<std::size_t>(drafted);
  reach_ *= acceptance_.expect(steps_ - 1, confidence);
  if (probing_ || reach_ >= more_[steps_]) return DraftDecision::kContinue;
  if (reach_ >= keep_[steps_]) return DraftDecision::kStop;
  return ++discarded_ % kSpared == 0 ? DraftDecision::kStop : DraftDecision::kDiscard;
}

void AutoGamma::observe(const Round& round) {
  const bool asked = std::exchange(asked_, false);
  if (round.drafted > 0) return judge(round);
  ++idle_;
  silent_ += round.tokens.size();
  if (asked && !rival_) {
    run_ = 0;
    verify_->record(0, static_cast<double>(round.verify_ns));
  }
  if (silent_ >= kSilent && !fallback_ && gamma_ == 0) fallback_ = unprofitable();
}

// Learn from a round that this policy drafted in.
void AutoGamma::judge(const Round& round) {
  if (probing_ && round.accepted > 0) {
    acceptance_.turn(1 - std::pow(1 - kTurn, static_cast<double>(idle_)));
  }
  acceptance_.learn(round.accepted, round.evaluated());
  verify_->record(round.drafted, static_cast<double>(round.verify_ns));
  if (!round.caught_up) {
    draft_.record(steps_ > 0 ? steps_ : round.drafted, static_cast<double>(round.draft_ns));
  }
  ++run_;
  idle_ = 0;
  if (probing_) {
    const double spent = static_cast<double>(round.draft_ns + round.verify_ns) * floor_;
    lost_ = std::min(kDearest, spent - 1 - acceptance_.chance(0));
    return;
  }
  silent_ = 0;
  if (round.accepted > 0) fallback_.reset();
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
  keep_ = {0};
  more_.clear();
  for (std::size_t k = 0; k < most_; ++k) {
    const double wider = verify[k + 1] - verify[k], step = draft[k + 1] - draft[k];
    // Drafted, and verified if it is one of the surer half.
    const double odds = std::log(chances[k] / (1 - chances[k])) + acceptance_.spread();
    double enough = (wider + 2 * step) / chance_of(odds);
    tokens = 0;
    reach = 1;
    for (std::size_t end = k; end < most_; ++end) {
      reach *= chances[end];
      tokens += reach;
      enough = std::min(enough, (total_[end + 1] - total_[k]) / tokens);
    }
    keep_.push_back(rate_ * wider);
    more_.push_back(rate_ * enough);
  }
  more_.push_back(2);  // a chance that no token has
}

// The tokens that a probe is expected to lose.
double AutoGamma::loss() const {
  return total_[most_ > 0 ? 1 : 0] * floor_ - 1 - acceptance_.chance(0);
}

std::string AutoGamma::unprofitable() const {
  char text[160];
  std::snprintf(text, sizeof text,
                "a round that drafts one token takes %.2f times as long as a token without it, "
                "and %.2f tokens are expected of it",
                total_[1] * floor_, 1 + acceptance_.chance(0));
  return text;
}

}  // namespace specrt::native
