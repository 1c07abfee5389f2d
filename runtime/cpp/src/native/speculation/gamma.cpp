#include "native/speculation/gamma.hpp"

#include <algorithm>
#include <utility>

namespace specrt::native {

BuiltGamma::BuiltGamma(std::shared_ptr<GammaPolicy> policy, std::vector<int> gammas)
    : policy_(std::move(policy)), gammas_(std::move(gammas)) {}

int BuiltGamma::choose() {
  const auto reaches = std::lower_bound(gammas_.begin(), gammas_.end(), policy_->choose());
  return reaches == gammas_.end() ? gammas_.back() : *reaches;
}

Weight BuiltGamma::weigh(int drafted, double confidence) {
  const Weight weight = policy_->weigh(drafted, confidence);
  const int kept = weight == Weight::kDrop ? drafted - 1 : drafted;
  return std::binary_search(gammas_.begin(), gammas_.end(), kept) ? weight : Weight::kMore;
}

void BuiltGamma::observe(const Round& round) { policy_->observe(round); }

}  // namespace specrt::native
