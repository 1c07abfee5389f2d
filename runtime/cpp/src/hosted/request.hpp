// Parameters as the JSON text that `specrt.embedded` reads.
#pragma once

#include <string>

#include "params.hpp"

namespace specrt::hosted {

// `processors` is JSON already.
std::string request_json(const Params& params, const std::string& processors);

}  // namespace specrt::hosted
