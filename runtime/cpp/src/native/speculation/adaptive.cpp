#include "native/speculation/adaptive.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

namespace specrt::native {

// Rounds in a row that draft, before a plain step shows what one costs now.
constexpr std::int64_t kCheck = 200;
// Tokens without drafting before that is called a fallback.
constexpr std::size_t kLimit = 256;
// Drafted tokens judged before an acceptance is quoted.
constexpr std::size_t kEnough = 8;
// Of the chance of the first token; a plan is made for each when it is first needed.
constexpr std::int64_t kCells = 32;
// Rounds between refits, at first fewer; refits between plans.
constexpr int kRefit = 16;
constexpr int kReplan = 4;
// Of so many rounds one is timed; the clock moves slower than the text.
constexpr int kTimed = 2;
// Share of tokens that count as the surest.
constexpr double kSure = 0.4;
// How much surer these must be, in log odds, for confidence to be worth asking for.
constexpr double kTelling = 0.2;
// Of 32 tokens to be left out one is verified all the same, to learn whether that was right.
constexpr unsigned kSpared = 31;
// Steps of a rival's rate, per plain step's.
constexpr double kFine = 16;

// The whole part of a number from 0 on, as far as it matters.
static std::int64_t whole(double number) {
  return number > 0 ? static_cast<std::int64_t>(std::min(number, 1e9)) : 0;
}

template <typename... Values>
static std::string formatted(const char* format, Values... values) {
  char text[256];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

AutoGamma::AutoGamma(const Costs& costs, int most, std::shared_ptr<const AutoGamma> rival)
    : most_(most), rival_(std::move(rival)), acceptance_(most), drift_(costs, most) {
  plan_ = planned();
  fallback_ = unpayable();
}

int AutoGamma::choose() {
  asked_ = true;
  trying_ = false;
  reach_ = 1.0;
  steps_ = 0;
  acceptance_.begin();
  plan_ = planned();
  if (plan_->gamma > 0 || (telling_ && plan_->more[0] <= 1.0)) {
    if (rests_.left > 0) {
      rests_.left -= 1;
      return 0;
    }
    if (run_ >= kCheck && !rival_) return 0;
    return telling_ ? most_ : plan_->gamma;
  }
  const int depth = probes_.depth(loss());
  trying_ = depth > 0;
  return std::min(depth, most_);
}

Weight AutoGamma::weigh(int drafted, double confidence) {
  steps_ = static_cast<std::size_t>(drafted);
  reach_ *= acceptance_.expect(steps_ - 1, confidence);
  if (reach_ >= plan_->more[steps_] || trying_) return Weight::kMore;
  if (reach_ >= plan_->keep[steps_]) return Weight::kLast;
  sparing_ = (++dropped_ & kSpared) == 0;
  return sparing_ ? Weight::kLast : Weight::kDrop;
}

void AutoGamma::observe(const Round& round) {
  const bool asked = std::exchange(asked_, false);
  if (round.drafted > 0) {
    judge(round);
  } else {
    idle(round, asked);
  }
}

// Learn from a round that this policy did not draft in.
void AutoGamma::idle(const Round& round, bool asked) {
  ++probes_.idle;
  if (asked && steps_ > 0) rests_.bore(drift_.prices().step[0] * floor());
  silent_ += round.tokens.size();
  if (asked && !rival_) {
    run_ = 0;
    drift_.time_verify(0, round.verify_ns);
  }
  if ((probes_.idle & (kRefit * kReplan - 1)) == 0) replan();
  if (silent_ >= kLimit && !fallback_) fallback_ = unprofitable();
}

// Learn from a round that this policy drafted in.
void AutoGamma::judge(const Round& round) {
  acceptance_.learn(round.accepted, round.evaluated());
  if (refit_in_ % kTimed == 0) {
    drift_.time_verify(round.drafted, round.verify_ns);
    drift_.time_draft(steps_ > 0 ? steps_ : round.drafted, round.draft_ns, !round.caught_up);
  }
  if (!sparing_) rests_.dull = 0;
  sparing_ = false;
  ++run_;
  probes_.idle = 0;
  judged_ += round.evaluated();
  kept_ += round.accepted;
  if (trying_) {
    charge(round);
  } else {
    probes_.reset();
    silent_ = 0;
    if (round.accepted > 0) {
      judged_ = kept_ = 0;
      fallback_.reset();
    }
  }
  if (--refit_in_ == 0) refit();
}

// Charge a probe what it lost: of one token on average, not by the luck it had.
void AutoGamma::charge(const Round& round) {
  const double kept = static_cast<double>(round.accepted);
  const double gained = 1.0 + (round.drafted == 1 ? acceptance_.mean() : kept);
  const double spent = static_cast<double>(round.draft_ns + round.verify_ns) * floor();
  probes_.charge(round.drafted, round.accepted, std::max(loss() / 2, spent - gained));
}

// The tokens that a probe is expected to cost, where it has nothing to catch up.
double AutoGamma::loss() const {
  const std::size_t one = most_ > 0 ? 1 : 0;
  return drift_.prices().total[one] * floor() - 1.0 - acceptance_.mean();
}

// The tokens per nanosecond to be had without drafting.
double AutoGamma::floor() const {
  const double plain = 1.0 / drift_.prices().total[0];
  return rival_ ? std::max(plain, rival_->rate()) : plain;
}

void AutoGamma::refit() {
  acceptance_.refit();
  refits_ = (refits_ + 1) % kReplan;
  const bool early = refit_after_ < kRefit;
  refit_after_ = std::min(kRefit, 2 * refit_after_);
  refit_in_ = refit_after_;
  if (early || refits_ == 0) replan();
}

// Let plans be made again, from what is known by now.
void AutoGamma::replan() {
  drift_.settle();
  plans_.clear();
  const auto [offset, share] = acceptance_.surest(kSure);
  telling_ = offset > kTelling;
  surest_ = telling_ ? offset : 0.0;
  share_ = telling_ ? share : 1.0;
}

// The plan for how easy the text is now, and how fast the rival.
std::shared_ptr<const Plan> AutoGamma::planned() {
  const std::int64_t cell = whole(acceptance_.mean() * kCells);
  const std::int64_t least = rival_ ? whole(floor() * drift_.prices().total[0] * kFine) : 0;
  auto& known = plans_[cell + kCells * least];
  if (!known) known = make_plan(cell, least);
  return known;
}

std::shared_ptr<const Plan> AutoGamma::make_plan(std::int64_t cell, std::int64_t least) const {
  const double mean = (static_cast<double>(cell) + 0.5) / kCells;
  const double odds = std::log(mean / (1.0 - mean));
  const Prices& prices = drift_.prices();
  const double rate = (least > 0 ? static_cast<double>(least) / kFine : 1.0) / prices.total[0];
  return std::make_shared<const Plan>(
      plan(prices, acceptance_.chances(odds), acceptance_.chances(odds, surest_), share_, rate));
}

// Say so where costs are such that not even perfect drafts would pay.
std::optional<std::string> AutoGamma::unpayable() const {
  const auto& total = drift_.prices().total;
  for (std::size_t g = 1; g < total.size(); ++g) {
    if (static_cast<double>(g + 1) * total[0] > total[g]) return std::nullopt;
  }
  if (most_ == 0) return std::nullopt;
  return formatted(
      "drafting and verifying one token takes %.1f times as long as a plain step here: no "
      "acceptance pays for that",
      total[1] / total[0] - 1);
}

std::optional<std::string> AutoGamma::unprofitable() const {
  if (judged_ >= kEnough) {
    const double rate = static_cast<double>(kept_) / static_cast<double>(judged_);
    return formatted("acceptance %.2f over the last %zu drafted tokens", rate, judged_);
  }
  if (rests_.dull >= static_cast<std::int64_t>(kEnough)) {
    return formatted("the draft was unsure of its first token %lld times in a row",
                     static_cast<long long>(rests_.dull));
  }
  return std::nullopt;
}

}  // namespace specrt::native
