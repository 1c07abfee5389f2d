#include "native/typical.hpp"

#include <cmath>

#include "native/mass.hpp"

namespace specrt::native {

void keep_typical(Distribution& weighed, double mass) {
  const std::size_t size = weighed.probs.size();
  if (size == 0) return;
  const double total = sum_of(weighed.probs);
  // Of logarithms, not of the share, which may be too small for a number.
  const double log_total = std::log(total);
  std::vector<Share> shares(size);
  for (std::size_t i = 0; i < size; ++i) {
    shares[i] = {log_total - std::log(weighed.probs[i]), weighed.probs[i] / total};
  }
  const double expected =
      sum_of(0, size, [&](std::size_t i) { return shares[i].weight * shares[i].rank; });
  std::vector<double> away(size);
  for (std::size_t i = 0; i < size; ++i) {
    away[i] = shares[i].rank = std::fabs(shares[i].rank - expected);
  }
  const double limit = cut(shares, mass).rank;
  auto next = away.begin();
  keep_where(weighed, [&next, limit](double) { return *next++ <= limit; });
}

}  // namespace specrt::native
