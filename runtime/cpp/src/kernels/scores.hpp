// What is read from a row of logits, in terms of a vector of 16 lanes. Included inside an anonymous
// namespace with tiles.hpp, which it brings.
#pragma once

#include "kernels/tiles.hpp"

// Logits that are searched, and then summed: 4 KiB, which the first cache still holds.
constexpr std::size_t kPartLogits = 1024;

// Softmax as Milakov and Gimelshein 2018, arXiv:1805.02867, compute it: a part that has a larger
// logit makes the sum of those before it smaller. Lanes after the last logit are minus infinity.
template <class V>
void score_row(const float* logits, std::size_t count, std::int64_t* best, float* confidence) {
  const float lowest = -__builtin_huge_valf();
  const auto bottom = V::spread(lowest);
  float largest = lowest;
  std::size_t place = 0;
  bool has_numbers = true;
  auto sum = V::spread(0);
  for (std::size_t first = 0; first < count && has_numbers; first += kPartLogits) {
    const std::size_t last = count - first < kPartLogits ? count : first + kPartLogits;
    auto most = bottom;
    auto magnitude = V::fill(0);  // as bits: what is not a number is largest
    for (std::size_t i = first; i < last; i += kTile) {
      const auto part = load_before<V>(logits, i, last, lowest);
      most = V::at_least(part, most);
      magnitude = V::most(magnitude, V::magnitude(part));
    }
    const float widest = V::largest(magnitude), highest = largest_of_lanes<V>(most);
    has_numbers = widest == widest;
    if (has_numbers && highest > largest) {
      sum = V::mul(sum, exponential<V>(V::spread(largest - highest)));
      largest = highest;
      place = first;
      while (logits[place] != largest) place++;
    }
    if (confidence == nullptr || largest == lowest) continue;
    const auto shift = V::spread(-largest);
    for (std::size_t i = first; i < last; i += kTile)
      sum = V::add(sum, exponential<V>(V::add(load_before<V>(logits, i, last, lowest), shift)));
  }
  const bool is_clear = has_numbers && largest - largest == 0;
  *best = is_clear ? static_cast<std::int64_t>(place) : -1;
  if (confidence != nullptr)
    *confidence = is_clear ? 1.0F / sum_of_lanes<V>(sum) : __builtin_nanf("");
}
