// The typical set of a distribution: the tokens that surprise about as much as is expected.
//
// Source: Meister et al. 2022, arXiv:2202.00666.
#pragma once

#include "native/sampling.hpp"

namespace specrt::native {

// Leave the tokens whose surprise is nearest to what is expected, up to a mass, at least one, and
// those as far off as the last one taken. `weighed` holds weights, above 0.
void keep_typical(Distribution& weighed, double mass);

}  // namespace specrt::native
