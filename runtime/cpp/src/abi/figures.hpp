// Statistics as the interface gives them out.
#pragma once

#include <cstddef>

#include "implementation.hpp"

namespace specrt::abi {

// Counts, and the rates that follow; the texts stay those of `stats`.
specrt_stats figures(const Stats& stats, std::size_t completion_tokens);

}  // namespace specrt::abi
