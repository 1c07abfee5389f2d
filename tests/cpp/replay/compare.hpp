// Holds what came of a generation to what was expected.
#pragma once

#include <string>

#include "native/text/json.hpp"

namespace specrt::checks {

// Print both where they differ; return how often they do.
int differs(const std::string& what, const std::string& found, const std::string& expected);

// Hold a value to another: the same kinds, names and texts, and numbers within what exp and log of
// two libraries differ. Times may be any; so may `seed` and
// `speculation` where null is expected.
int compare(const std::string& place, const native::Json& found, const native::Json& expected);

}  // namespace specrt::checks
