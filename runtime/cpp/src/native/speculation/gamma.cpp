#include "native/speculation/gamma.hpp"

#include <algorithm>
#include <utility>

namespace specrt::native {

void AdaptiveGamma::observe(const Round& round) {
  policy_->observe({round.tokens.size(), round.drafted, round.accepted, round.draft_ns,
                    round.verify_ns, round.caught_up});
}

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

}  // namespace specrt::native
