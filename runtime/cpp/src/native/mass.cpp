#include "native/mass.hpp"

#include <algorithm>

namespace specrt::native {

namespace {

// Shares that are sorted, and added up one by one.
constexpr std::ptrdiff_t kFew = 1024;

bool first(const Share& one, const Share& other) { return one.rank < other.rank; }

}  // namespace

double sum_of(const std::vector<double>& terms) {
  return sum_of(0, terms.size(), [&terms](std::size_t i) { return terms[i]; });
}

Cut cut(std::vector<Share>& shares, double mass) {
  auto begin = shares.begin();
  auto end = shares.end();
  double taken = 0.0;
  while (end - begin > kFew) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, first);
    const double more = sum_of(0, static_cast<std::size_t>(middle - begin), [begin](std::size_t i) {
      return begin[static_cast<std::ptrdiff_t>(i)].weight;
    });
    if (taken + more < mass) {
      begin = middle;
      taken += more;
    } else {
      end = middle;
    }
  }
  std::sort(begin, end, first);
  auto last = begin;
  for (auto share = begin; share != end; ++share) {
    taken += share->weight;
    if (taken - share->weight < mass) last = share;
  }
  return {last->rank, static_cast<std::size_t>(last - shares.begin()) + 1};
}

}  // namespace specrt::native
