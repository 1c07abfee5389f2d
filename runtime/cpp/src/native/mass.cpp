#include "native/mass.hpp"

#include <algorithm>

namespace specrt::native {

namespace {

using Shares = std::vector<Share>::iterator;

// Shares that are sorted, and added up one by one.
constexpr std::ptrdiff_t kFew = 1024;
// Others are thrown into so many bins by their rank first.
constexpr std::size_t kBins = 1024;

bool first(const Share& one, const Share& other) { return one.rank < other.rank; }

// Some of the shares, after those that are taken for certain.
struct Rest {
  Shares begin;
  Shares end;
  double taken;
};

// Leave the shares of the bin in which the mass is reached, all of the ranks from `least` to
// `most`, which differ.
void narrow(Rest& rest, double least, double most, double mass) {
  const double range = most - least;
  const auto bin_of = [=](const Share& share) {
    return std::min(static_cast<std::size_t>((share.rank - least) / range * kBins), kBins - 1);
  };
  double weights[kBins] = {};
  for (auto share = rest.begin; share != rest.end; ++share)
    weights[bin_of(*share)] += share->weight;
  std::size_t bin = 0;
  // The last bin is never empty.
  while (bin < kBins - 1 && rest.taken + weights[bin] < mass) rest.taken += weights[bin++];
  const auto before = [=](const Share& share) { return bin_of(share) < bin; };
  const auto inside = [=](const Share& share) { return bin_of(share) == bin; };
  rest.begin = std::partition(rest.begin, rest.end, before);
  rest.end = std::partition(rest.begin, rest.end, inside);
}

}  // namespace

double sum_of(const std::vector<double>& terms) {
  return sum_of(0, terms.size(), [&terms](std::size_t i) { return terms[i]; });
}

Cut cut(std::vector<Share>& shares, double mass) {
  Rest rest{shares.begin(), shares.end(), 0.0};
  while (rest.end - rest.begin > kFew) {
    const auto [least, most] = std::minmax_element(rest.begin, rest.end, first);
    if (least->rank == most->rank) break;
    narrow(rest, least->rank, most->rank, mass);
  }
  std::sort(rest.begin, rest.end, first);
  auto last = rest.begin;
  double taken = rest.taken;
  for (auto share = rest.begin; share != rest.end; ++share) {
    taken += share->weight;
    if (taken - share->weight < mass) last = share;
  }
  return {last->rank, static_cast<std::size_t>(last - shares.begin()) + 1};
}

}  // namespace specrt::native
