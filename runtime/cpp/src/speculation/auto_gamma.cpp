#include "speculation/auto_gamma.hpp"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <locale>
#include <sstream>
#include <utility>

namespace specrt::speculation {

static std::vector<double> table(int most, const Costs& costs, double (Costs::*cost)(int) const) {
  std::vector<double> values;
  for (int gamma = 0; gamma <= most; ++gamma) values.push_back((costs.*cost)(gamma));
  return values;
}

AutoGamma::AutoGamma(const Costs& costs, int most, std::shared_ptr<const AutoGamma> rival,
                     std::shared_ptr<SharedStep> step)
    : most_(static_cast<std::size_t>(most)),
      rival_(std::move(rival)),
      step_(step ? std::move(step) : std::make_shared<SharedStep>(costs, most)),
      acceptance_(most_),
      verify_tracker_(rival_ ? rival_->verify_tracker_
                             : std::make_shared<CostTracker>(table(most, costs, &Costs::verify),
                                                             costs.assumed)),
      draft_tracker_(table(most, costs, &Costs::draft), costs.assumed, costs.one_pass),
      outside_(costs.outside_ns) {
  const auto drafts = table(most, costs, &Costs::draft);
  free_ = std::all_of(drafts.begin(), drafts.end(), [](double ns) { return ns == 0; });
  plan();
  bool may_pay = most_ == 0;  // with perfect drafts at least
  for (std::size_t g = 1; g <= most_; ++g) {
    may_pay = may_pay || static_cast<double>(g + 1) * total_[0] > total_[g];
  }
  if (!may_pay) tokens_since_draft_ = kFallbackAfter;
}

int AutoGamma::choose() {
  const int most = most_worth();
  counted_ = most == 0 && step_->rows > 1;
  if (counted_) count_idle(1);
  return most;
}

int AutoGamma::most_worth() {
  joint_acceptance_ = 1;
  steps_ = 0;
  probing_ = false;
  acceptance_.begin();
  plan();
  const bool shares = step_->rows > 1;
  const int most = static_cast<int>(most_);
  if (shares && !free_) {
    probing_ = step_->probing;
    return probing_ || gamma_ == 0 ? static_cast<int>(gamma_) : most;
  }
  // How sure the drafter is of a first token is worth a look before it is given up.
  const double reading = free_ ? 0 : step_->unread_ns;
  const bool worth = gamma_ > 0 || (acceptance_.has_confidence() && pays(0));
  if (worth && step_->room * (1 / floor_ - 1 / rate_) >= reading) {
    probe_loss_ = 0;
    const bool due = shares ? step_->first() : !rival_ && step_->plain_due();
    return due ? 0 : most;
  }
  if (most_ == 0) return 0;
  const double lost = (total_[1] + reading) * floor_ - acceptance_.tokens()[1];
  const double loss = std::min(kMaxProbeLoss, lost);
  probing_ = static_cast<double>(rounds_idle_) * kProbing >= std::max(probe_loss_, loss);
  return probing_ ? 1 : 0;
}

DraftDecision AutoGamma::decide(int drafted, double confidence) {
  steps_ = static_cast<std::size_t>(drafted);
  joint_acceptance_ *= acceptance_.expect(steps_ - 1, confidence);
  const bool shares = step_->rows > 1 && !free_;
  if (shares) total_ = step_->drafting(steps_);
  if (probing_ || pays(steps_)) {
    if (shares) step_->go_on(steps_);
    return DraftDecision::kContinue;
  }
  const double cost = verify_[steps_] - verify_[steps_ - 1];
  return joint_acceptance_ >= rate_ * cost ? DraftDecision::kStop : DraftDecision::kDiscard;
}

void AutoGamma::observe(const RoundCounts& round) {
  const bool alone = step_->rows == 1;
  if (round.drafted > 0) {
    judge(round, alone);
  } else if (!counted_) {
    count_idle(round.tokens);
    if (alone && !rival_) verify_tracker_->record(0, static_cast<double>(round.verify_ns));
  }
  if (alone && !round.caught_up && (round.drafted > 0 || !rival_)) {
    step_->probing = probing_;
    const int made = static_cast<int>(round.tokens), drafted = static_cast<int>(round.drafted);
    step_->settle({made, drafted, drafted, round.draft_ns, round.verify_ns});
  }
}

// Count a round without drafts; in company the text may have become another meanwhile.
void AutoGamma::count_idle(std::size_t tokens) {
  ++rounds_idle_;
  tokens_since_draft_ += tokens;
  if (step_->rows > 1) acceptance_.mix_with_usual(kSwitchChance);
}

// Learn from a round that this policy drafted in.
void AutoGamma::judge(const RoundCounts& round, bool alone) {
  if (probing_ && round.accepted > 0) {
    const auto idle = static_cast<double>(rounds_idle_);
    acceptance_.mix_with_usual(1.0 - std::pow(1.0 - kSwitchChance, idle));
  }
  acceptance_.learn(round.accepted, round.accepted + (round.accepted < round.drafted ? 1 : 0));
  if (alone) {
    verify_tracker_->record(round.drafted, static_cast<double>(round.verify_ns));
    if (!round.caught_up) {
      const std::size_t steps = steps_ > 0 ? steps_ : round.drafted;
      draft_tracker_.record(steps, static_cast<double>(round.draft_ns));
    }
  }
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
  if (step_->rows == 1) return plan_alone();
  verify_ = step_->verify;
  gamma_ = 0;
  const std::vector<double>& tokens = acceptance_.tokens();
  if (free_) {
    total_ = step_->copying;
    rate_ = step_->rate;
    double gain = tokens[0] - rate_ * total_[0];
    for (std::size_t g = 1; g <= most_; ++g) {
      const double gained = tokens[g] - rate_ * total_[g];
      if (gained > gain) {
        gamma_ = g;
        gain = gained;
      }
    }
  } else {
    total_ = step_->drafting(0);
    if (step_->drafts(acceptance_)) gamma_ = static_cast<std::size_t>(step_->gamma);
    rate_ = step_->price * tokens[gamma_];
  }
  floor_ = rate_;
}

void AutoGamma::plan_alone() {
  const std::vector<double>& drafts = draft_tracker_.costs();
  verify_ = verify_tracker_->costs();
  total_.clear();
  for (std::size_t g = 0; g <= most_; ++g) total_.push_back(verify_[g] + drafts[g] + outside_);
  for (std::size_t g = 1; g <= most_; ++g) total_[g] /= step_->company().worth;
  const double plain = acceptance_.tokens()[0] / total_[0];
  floor_ = rival_ ? std::max(plain, rival_->rate()) : plain;
  gamma_ = 0;
  rate_ = floor_;
  for (std::size_t g = 1; g <= most_; ++g) {
    const double rate = acceptance_.tokens()[g] / total_[g];
    if (rate > rate_) {
      gamma_ = g;
      rate_ = rate;
    }
  }
  step_->floor = plain;
  step_->rate = rate_;
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
  const double worth = step_->company().worth;
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text << std::fixed << std::setprecision(2) << "a round that drafts one token takes "
       << total_[1] * floor_ << " times as long as a token without it, and "
       << acceptance_.tokens()[1] << " tokens are expected of it";
  if (worth != 1) text << "; drafts made " << worth << " of what was expected";
  return text.str();
}

}  // namespace specrt::speculation
