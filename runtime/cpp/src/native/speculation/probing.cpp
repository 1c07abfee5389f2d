#include "native/speculation/probing.hpp"

#include <algorithm>
#include <cmath>

namespace specrt::native {

// Share of the time that probes may cost while drafting does not pay.
constexpr double kProbing = 0.015;
// How much longer to wait after each probe that fails, and how many times as long at most.
constexpr double kPatience = 1.05;
constexpr double kLongest = 4.0;
// Failures that count: from fewer on the wait is the longest.
constexpr int kMisses = 100;
// The most one probe counts, in tokens lost: a pass held up for other reasons is not its fault.
constexpr double kDearest = 8.0;
// Drafts in a row whose first token was left out, before there is a rest.
constexpr std::int64_t kDull = 3;

int Probes::depth(double loss) {
  if (!wait_) wait_ = loss / kProbing;
  return static_cast<double>(idle) >= *wait_ ? 1 + hits_ : 0;
}

void Probes::charge(std::size_t drafted, std::size_t accepted, double lost) {
  hits_ = accepted == drafted ? hits_ + 1 : 0;
  misses_ = accepted > 0 ? 0 : std::min(misses_ + 1, kMisses);
  const double patience = std::min(kLongest, std::pow(kPatience, misses_));
  wait_ = std::min(kDearest, lost) / kProbing * patience;
}

void Probes::reset() {
  wait_.reset();
  hits_ = misses_ = 0;
}

void Rests::bore(double loss) {
  ++dull;
  if (dull <= kDull) return;
  const auto doublings = static_cast<double>(std::min<std::int64_t>(dull - kDull - 1, 30));
  left = std::min(loss / kProbing, std::pow(2.0, doublings));
}

}  // namespace specrt::native
