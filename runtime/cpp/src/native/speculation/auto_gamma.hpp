// The gamma policy that drafts as far as it pays.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "native/speculation/costs.hpp"
#include "native/speculation/gamma.hpp"

namespace specrt::native {

// The chance of each drafted token, given its place and its drafter's confidence: a belief over how
// easy the text is, and weights of being surer than usual, of being less sure, and of the place.
// Tokens without drafting, probes aside, before that is called a fallback.
constexpr std::size_t kFallbackAfter = 256;

class Acceptance {
 public:
  explicit Acceptance(std::size_t most);
  void begin() { drafted_.clear(); }
  double expect(std::size_t place, double confidence);      // chance of the next drafted token
  void learn(std::size_t accepted, std::size_t evaluated);  // what became of the draft
  void mix_with_usual(double chance);  // the text may have become easier or harder
  bool has_confidence() const {
    return has_confidence_;
  }  // whether the drafter ever told how sure it is
  // By number of tokens of usual confidence, the chance that all of them are kept, and how many a
  // round that drafts them is expected to emit.
  const std::vector<double>& reach() const { return reach_; }
  const std::vector<double>& tokens() const { return tokens_; }

 private:
  static constexpr std::size_t kLevels = 9;
  using Belief = std::array<double, kLevels>;
  using Features = std::array<double, 3>;
  double times(const Features& features) const;

  Belief odds_, belief_, usual_;  // odds of a drafted token, by level: e^-4 to e^4
  Features weights_, seen_;
  std::vector<Features> drafted_;
  std::vector<double> ease_;  // odds at each place, given that the tokens before it are kept
  std::vector<double> reach_, tokens_;
  double mean_ = 1;  // log odds of the drafter's confidence; 73 % before any is known
  bool has_confidence_ = false;
};

// Drafts as many tokens as pay, none included. `rival` is the policy of the drafter that follows
// where this one proposes nothing. The Python runtime's `AutoGamma` has the reasons.
class AutoGamma : public GammaPolicy {
 public:
  AutoGamma(const Costs& costs, int most, std::shared_ptr<const AutoGamma> rival = nullptr);
  int choose() override;
  DraftDecision decide(int drafted, double confidence) override;
  void observe(const Round& round) override;

  // Tokens per nanosecond expected of the coming rounds.
  double rate() const { return rate_; }
  // Why nothing is drafted but for probes; none as long as drafting pays.
  std::optional<std::string> fallback(std::size_t after = kFallbackAfter) const;

 private:
  void plan();
  bool pays(std::size_t drafted) const;
  void judge(const Round& round);

  std::size_t most_;
  std::shared_ptr<const AutoGamma> rival_;
  Acceptance acceptance_;
  std::shared_ptr<CostTracker> verify_;
  CostTracker draft_;
  double outside_;
  std::vector<double> total_;  // what rounds cost, by their number of drafted tokens
  std::size_t gamma_ = 0;
  double floor_ = 0, rate_ = 0, joint_acceptance_ = 1, probe_loss_ = 0;
  std::size_t steps_ = 0, tokens_since_draft_ = 0;
  std::int64_t rounds_drafted_ = 0, rounds_idle_ = 0;
  bool probing_ = false;
};

}  // namespace specrt::native
