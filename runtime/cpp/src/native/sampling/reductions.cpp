#include "native/sampling/reductions.hpp"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>

namespace specrt::native {

namespace {

// Scores looked at together: loops of this length become vector instructions.
constexpr std::size_t kLanes = 16;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

bool any_at_least(const float* scores, float bar) {
  int any = 0;
  for (std::size_t j = 0; j < kLanes; ++j) any |= scores[j] >= bar ? 1 : 0;
  return any != 0;
}

// The k largest of what it is shown, and the bar that one more must pass.
class Best {
 public:
  Best(std::size_t size, std::size_t k) : k_(k), room_(std::min(size, 2 * k + 64)) {
    kept_.reserve(room_);
  }

  bool full() const { return full_; }
  float bar() const { return bar_; }

  void show(float score) {
    if (full_ && !(score > bar_)) return;
    kept_.push_back(score);
    if (kept_.size() == room_) settle();
  }

  // Forget all but the k largest, and return the least of them.
  float settle() {
    const auto last = kept_.begin() + static_cast<std::ptrdiff_t>(k_ - 1);
    std::nth_element(kept_.begin(), last, kept_.end(), std::greater<float>());
    kept_.resize(k_);
    full_ = true;
    return bar_ = kept_.back();
  }

 private:
  std::size_t k_;
  std::size_t room_;
  std::vector<float> kept_;
  bool full_ = false;
  float bar_ = kLowest;
};

}  // namespace

float peak_of(const float* scores, std::size_t size) {
  float best[kLanes];
  std::uint32_t odd[kLanes] = {};
  std::fill(best, best + kLanes, kLowest);
  std::size_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (std::size_t j = 0; j < kLanes; ++j) {
      const float score = scores[i + j];
      best[j] = best[j] > score ? best[j] : score;
      odd[j] |= score != score ? 1U : 0U;
    }
  }
  for (; i < size; ++i) {
    best[0] = best[0] > scores[i] ? best[0] : scores[i];
    odd[0] |= scores[i] != scores[i] ? 1U : 0U;
  }
  float peak = kLowest;
  for (std::size_t j = 0; j < kLanes; ++j) {
    if (odd[j] != 0) return std::numeric_limits<float>::quiet_NaN();
    peak = std::max(peak, best[j]);
  }
  return peak;
}

void at_least(const float* scores, std::size_t size, float bar, std::vector<Token>& ids) {
  for (std::size_t i = 0; i < size; i += kLanes) {
    const std::size_t end = std::min(size, i + kLanes);
    if (end - i == kLanes && !any_at_least(scores + i, bar)) continue;
    for (std::size_t j = i; j < end; ++j) {
      if (scores[j] >= bar) ids.push_back(static_cast<Token>(j));
    }
  }
}

float kth_largest(const float* scores, std::size_t size, std::size_t k) {
  Best best(size, k);
  for (std::size_t i = 0; i < size; i += kLanes) {
    const std::size_t end = std::min(size, i + kLanes);
    if (best.full() && end - i == kLanes && !any_at_least(scores + i, best.bar())) continue;
    for (std::size_t j = i; j < end; ++j) best.show(scores[j]);
  }
  return best.settle();
}

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
