// How far to draft: the protocol of gamma policies, and those that sessions use.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "native/speculation/round.hpp"
#include "speculation/auto_gamma.hpp"

namespace specrt::native {

using speculation::AutoGamma;
using speculation::DraftDecision;

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

// Drafts as far as it pays.
class AdaptiveGamma : public GammaPolicy {
 public:
  explicit AdaptiveGamma(std::shared_ptr<AutoGamma> policy) : policy_(std::move(policy)) {}
  int choose() override { return policy_->choose(); }
  DraftDecision decide(int drafted, double confidence) override {
    return policy_->decide(drafted, confidence);
  }
  void observe(const Round& round) override;

 private:
  std::shared_ptr<AutoGamma> policy_;
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
