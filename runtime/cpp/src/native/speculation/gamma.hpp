// How far to draft: the protocol of gamma policies, and fixed gammas.
#pragma once

#include <memory>
#include <vector>

#include "native/speculation/round.hpp"

namespace specrt::native {

// What becomes of the token just drafted: left out, the last one, or another may follow.
enum class DraftDecision { kDiscard, kStop, kContinue };

// Decides how many tokens a round drafts, from what rounds before it came to.
class GammaPolicy {
 public:
  virtual ~GammaPolicy() = default;
  // The most tokens to draft in the coming round; 0 is a plain step.
  virtual int choose() = 0;
  // What becomes of the token just drafted. `drafted` is its place in the draft, from 1;
  // `confidence` is its drafter's, in (0, 1], and 1 for every token where it has none to give.
  virtual DraftDecision decide(int drafted, double confidence) = 0;
  // Learn from a round: its own, or one in which nothing was drafted.
  virtual void observe(const Round& round) = 0;
};

// Drafts the same number of tokens every round.
class FixedGamma : public GammaPolicy {
 public:
  explicit FixedGamma(int gamma) : gamma_(gamma) {}
  int choose() override { return gamma_; }
  DraftDecision decide(int, double) override { return DraftDecision::kContinue; }
  void observe(const Round&) override {}

 private:
  int gamma_;
};

// Keeps another policy to the gammas that verify passes were built for. Where it would stop
// between two of them the draft goes on to the next one.
class BuiltGamma : public GammaPolicy {
 public:
  // `gammas` rise from 0.
  BuiltGamma(std::shared_ptr<GammaPolicy> policy, std::vector<int> gammas);
  int choose() override;
  DraftDecision decide(int drafted, double confidence) override;
  void observe(const Round& round) override;

 private:
  std::shared_ptr<GammaPolicy> policy_;
  std::vector<int> gammas_;
};

}  // namespace specrt::native
