// The checks of drafting; see check.hpp, and tests/cpp/drafting.py for what the vectors hold.
#pragma once

#include <string>
#include <vector>

#include "native/speculation/costs.hpp"
#include "native/text/json.hpp"

namespace specrt::checks {

native::Costs costs_of(const native::Json& fields);
// Print what differs; return how much did, 0 or 1. Numbers are compared to the last bit.
int equal(const std::string& what, double found, double expected);
int equal(const std::string& what, const std::vector<double>& found, const native::Json& expected);

}  // namespace specrt::checks
