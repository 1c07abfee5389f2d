// Holds parts of the native implementation to vectors that the Python runtime made.
#pragma once

#include <string>

#include "native/text/json.hpp"

namespace specrt::checks {

// Compare with the vectors of one file; return how many differ, after printing each.
using Check = int (*)(const native::Json& vectors);

// Makes `native_check NAME FILE` run a check.
struct Registered {
  Registered(const char* name, Check check);
};

// Print what differs, and return 1.
int differs(const std::string& what, const std::string& found, const std::string& expected);

}  // namespace specrt::checks
