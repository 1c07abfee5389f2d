// How far to draft: the protocol, the policy that always drafts equally far, and built gammas.
#pragma once

#include <memory>
#include <vector>

#include "native/round.hpp"

namespace specrt::native {

enum class Weight { kDrop, kLast, kMore };  // see specrt.gamma.Weight

class GammaPolicy {
 public:
  virtual ~GammaPolicy() = default;
  virtual int choose() = 0;
  virtual Weight weigh(int drafted, double confidence) = 0;
  virtual void observe(const Round& round) = 0;
};

// What passes cost, in nanoseconds: verify[i] of i + 1 tokens, draft[g] of g drafted tokens.
struct Costs {
  std::vector<double> verify_ns;
  std::vector<double> draft_ns;
  double outside_ns = 0;
};

}  // namespace specrt::native
