// The gamma policy that drafts as far as it pays; specrt.speculation.auto_gamma has the reasons.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "speculation/acceptance.hpp"
#include "speculation/costs.hpp"
#include "speculation/shared_step.hpp"

namespace specrt::speculation {

// What becomes of the token just drafted: left out, the last one, or another may follow.
enum class DraftDecision { kDiscard, kStop, kContinue };

// Tokens without drafting, probes aside, before that is called a fallback.
constexpr std::size_t kFallbackAfter = 256;

// What policies learn of a round: tokens committed, drafted and accepted, times, and whether the
// drafter first fed tokens of earlier rounds.
struct RoundCounts {
  std::size_t tokens, drafted, accepted;
  std::int64_t draft_ns, verify_ns;
  bool caught_up;
};

// Drafts as many tokens as pay, none included. `rival` is the policy of the drafter that follows
// where this one proposes nothing; `step` is what all rows of a step share.
class AutoGamma {
 public:
  AutoGamma(const Costs& costs, int most, std::shared_ptr<const AutoGamma> rival = nullptr,
            std::shared_ptr<SharedStep> step = nullptr);
  // In company a round that is to draft none needs not be observed.
  int choose();
  // Throws std::out_of_range for more tokens than `most`; so does `observe`.
  DraftDecision decide(int drafted, double confidence);
  void observe(const RoundCounts& round);

  // Tokens per nanosecond expected of the coming rounds.
  double rate() const { return rate_; }
  const Acceptance& acceptance() const { return acceptance_; }
  // Why nothing is drafted but for probes; none as long as drafting pays.
  std::optional<std::string> fallback(std::size_t after = kFallbackAfter) const;

 private:
  int most_worth();
  void count_idle(std::size_t tokens);
  void plan();
  void plan_alone();
  bool pays(std::size_t drafted) const;
  void judge(const RoundCounts& round, bool alone);

  std::size_t most_;
  std::shared_ptr<const AutoGamma> rival_;
  std::shared_ptr<SharedStep> step_;
  Acceptance acceptance_;
  std::shared_ptr<CostTracker> verify_tracker_;
  CostTracker draft_tracker_;
  double outside_;
  bool free_;                           // whether it drafts without passes
  std::vector<double> total_, verify_;  // what rounds cost, and what verifying costs of that
  std::size_t gamma_ = 0;
  double floor_ = 0, rate_ = 0, joint_acceptance_ = 1, probe_loss_ = 0;
  std::size_t steps_ = 0, tokens_since_draft_ = 0;
  std::int64_t rounds_idle_ = 0;
  bool probing_ = false, counted_ = false;
};

}  // namespace specrt::speculation
