#include "native/scores.hpp"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>

namespace specrt::native {

namespace {

// Scores looked at together: loops of this length become vector instructions.
constexpr std::size_t kLanes = 16;
constexpr float kNone = -std::numeric_limits<float>::infinity();

bool any_at_least(const float* scores, float bar) {
  int found = 0;
  for (std::size_t j = 0; j < kLanes; ++j) found |= scores[j] >= bar ? 1 : 0;
  return found != 0;
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
  float bar_ = kNone;
};

}  // namespace

float peak_of(const float* scores, std::size_t size) {
  float best[kLanes];
  std::uint32_t odd[kLanes] = {};
  std::fill(best, best + kLanes, kNone);
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
  float peak = kNone;
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

}  // namespace specrt::native
