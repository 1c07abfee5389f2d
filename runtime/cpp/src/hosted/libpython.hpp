// Where the library of a Python interpreter is.
#pragma once

#include <string>

namespace specrt::hosted {

struct Python {
  std::string interpreter;  // tells Python where its packages are
  std::string library;
};

// The interpreter at this path and its library; the configured one where it is empty.
// Throws Failure where there is none, where it does not start, or has no shared library.
Python find_python(const std::string& interpreter);

}  // namespace specrt::hosted
