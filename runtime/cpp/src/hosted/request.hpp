// Parameters as the JSON text that the Python module reads.
#pragma once

#include <string>

#include "params.hpp"

namespace specrt::hosted {

// Processors are passed by address: [function, user, hold] each.
std::string request_json(const Params& params);

}  // namespace specrt::hosted
