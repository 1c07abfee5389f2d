// Reductions over rows of a vocabulary: the largest, the k largest, sums, and shortest prefixes of
// a mass.
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

// The sum of term(begin) to term(end - 1), in the order NumPy adds: by eight, in halves.
template <class Term>
double sum_of(std::size_t begin, std::size_t end, const Term& term) {
  const std::size_t size = end - begin;
  if (size > 128) {
    const std::size_t half = begin + size / 2 - size / 2 % 8;
    const double first = sum_of(begin, half, term);
    return first + sum_of(half, end, term);
  }
  double total = 0.0;
  std::size_t i = begin;
  if (size >= 8) {
    double sums[8];
    for (std::size_t j = 0; j < 8; ++j) sums[j] = term(i + j);
    for (i += 8; i + 8 <= end; i += 8) {
      for (std::size_t j = 0; j < 8; ++j) sums[j] += term(i + j);
    }
    total =
        ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  }
  for (; i < end; ++i) total += term(i);
  return total;
}

double sum_of(const std::vector<double>& terms);

// A weight, and where it stands: those of the least rank are taken first.
struct Share {
  double rank;
  double weight;
};

// The rank of the last one taken, and how many were.
struct Cut {
  double rank;
  std::size_t count;
};

// Take shares until what was taken before reaches a mass; at least one of them. Shares change
// places. Of many only a few are sorted: the sum before those rounds otherwise than adding up in
// order, which shows only where the mass is met to 1e-12 of it.
Cut cut(std::vector<Share>& shares, double mass);

}  // namespace specrt::native
