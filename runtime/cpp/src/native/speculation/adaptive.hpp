// The gamma policy that is never slower: as many tokens as pay, round by round.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "native/speculation/acceptance.hpp"
#include "native/speculation/drift.hpp"
#include "native/speculation/gamma.hpp"
#include "native/speculation/plan.hpp"
#include "native/speculation/probing.hpp"

namespace specrt::native {

// Drafts as many tokens as pay, none included, from costs and a running estimate.
//
// `rival` is the policy of whoever drafts when this one does not; without one that is a plain
// step. What was learned stays for the generations that follow.
//
// While drafting does not pay, it probes: a round of one drafted token now and then, spaced so that
// probes cost 1.5 % of the time, and less the longer they fail. Each is charged what it really
// took, draft passes that caught up included.
class AutoGamma : public GammaPolicy {
 public:
  AutoGamma(const Costs& costs, int most, std::shared_ptr<const AutoGamma> rival = nullptr);

  // The most tokens worth drafting now: none, one to probe, or more.
  int choose() override;
  // Weighs the chance of a token to be kept against what it costs.
  Weight weigh(int drafted, double confidence) override;
  // Learns from the tokens that were judged, and from what passes took. A round in which others
  // drafted, or nothing matched, only brings the next probe nearer.
  void observe(const Round& round) override;

  // Tokens per nanosecond expected of the coming rounds.
  double rate() const { return plan_->rate; }
  // Why nothing is drafted but for probes; none again as soon as drafting pays.
  const std::optional<std::string>& fallback() const { return fallback_; }

 private:
  using Plans = std::unordered_map<std::int64_t, std::shared_ptr<const Plan>>;

  void idle(const Round& round, bool asked);
  void judge(const Round& round);
  void charge(const Round& round);
  double loss() const;
  double floor() const;
  void refit();
  void replan();
  std::shared_ptr<const Plan> planned();
  std::shared_ptr<const Plan> make_plan(std::int64_t cell, std::int64_t least) const;
  std::optional<std::string> unpayable() const;
  std::optional<std::string> unprofitable() const;

  int most_;
  std::shared_ptr<const AutoGamma> rival_;
  Acceptance acceptance_;
  Drift drift_;
  Plans plans_;
  double surest_ = 0.0, share_ = 1.0;
  bool telling_ = false;
  int refit_in_ = 4, refit_after_ = 4;
  int refits_ = 0;
  std::shared_ptr<const Plan> plan_;
  double reach_ = 1.0;
  std::size_t steps_ = 0;
  bool asked_ = false, trying_ = false, sparing_ = false;
  std::int64_t run_ = 0;
  unsigned dropped_ = 0;
  Probes probes_;
  Rests rests_;
  std::size_t silent_ = 0, judged_ = 0, kept_ = 0;
  std::optional<std::string> fallback_;
};

}  // namespace specrt::native
