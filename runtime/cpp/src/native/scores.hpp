// Looking over a row of scores, a vocabulary long: the largest, those above a bar, the k largest.
#pragma once

#include <cstddef>
#include <vector>

#include "params.hpp"

namespace specrt::native {

// The largest score: NaN where any of them is, minus infinity where there is none.
float peak_of(const float* scores, std::size_t size);

// Append the ids of the scores that reach a bar, ascending.
void at_least(const float* scores, std::size_t size, float bar, std::vector<Token>& ids);

// The k-th largest score, 0 < k <= size; none of them NaN.
float kth_largest(const float* scores, std::size_t size, std::size_t k);

}  // namespace specrt::native
