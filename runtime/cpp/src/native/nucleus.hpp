// The nucleus of a row: the fewest most likely tokens whose mass reaches top-p.
//
// Source: Holtzman et al. 2020, arXiv:1904.09751.
#pragma once

#include <cstddef>

#include "native/sampling.hpp"

namespace specrt::native {

// Weigh the tokens of a row that `weighed.ids` names: exp((logit - peak) / temperature).
void weigh(const float* logits, float peak, double temperature, Distribution& weighed);

// Leave the fewest largest weights that sum to `mass`, at least one; of those that tie for the last
// place the lower ids. `weighed` holds weights where a distribution has probabilities.
void keep_nucleus(Distribution& weighed, double mass);

// The nucleus of a whole vocabulary, weighed. All tokens are weighed in f32 only, and those that
// may be in the nucleus again in f64. The mass of the others is therefore good to 1e-6 of the
// whole, here as in Python, where it rounds otherwise: the nucleus may be one token larger or
// smaller where top-p is met that closely.
Distribution nucleus_of(const float* logits, std::size_t vocabulary, float peak, double temperature,
                        double top_p);

}  // namespace specrt::native
