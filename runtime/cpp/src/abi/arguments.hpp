// Errors about arguments, in one wording.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "failure.hpp"

namespace specrt::abi {

[[noreturn]] inline void invalid(const std::string& message) {
  throw Failure(SPECRT_INVALID_ARGUMENT, message);
}

inline void require(const void* pointer, const char* name) {
  if (pointer == nullptr) invalid(std::string(name) + " is NULL; expected a pointer");
}

template <typename Result>
void require_function(Result function, const char* name) {
  if (function == nullptr) invalid(std::string(name) + " is NULL; expected a function");
}

// More than memory could hold is a length that went below zero.
inline void require_count(const char* name, std::size_t count, std::size_t size) {
  if (count > static_cast<std::size_t>(PTRDIFF_MAX) / size) {
    invalid("the length of " + std::string(name) + " is " + std::to_string(count) +
            "; expected one that fits into memory");
  }
}

}  // namespace specrt::abi
