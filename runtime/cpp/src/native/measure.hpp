// What passes cost here, for a bundle that was not tuned.
#pragma once

#include "native/bundle/bundle.hpp"
#include "native/engine/protocol.hpp"
#include "native/speculation/costs.hpp"

namespace specrt::native {

// Run rounds of every gamma in turn for about half a second, and return the medians of what they
// took; see specrt.tuning.measure_costs. What the KV buffers held is overwritten. Throws
// Failure(SPECRT_ENGINE) from a pass.
Costs measure_costs(Engine& target, Engine* draft, const Manifest& manifest);

}  // namespace specrt::native
