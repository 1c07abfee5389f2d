// Structures that say their size, so that callers and libraries of different age understand each
// other: only what both know is read and written.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

#include "abi/arguments.hpp"

namespace specrt::abi {

constexpr std::size_t kLargestStruct = 4096;  // beyond, `size` was never set

// The size that a caller says, which must hold at least the fields of the first version.
inline std::size_t checked_size(const void* given, const char* name, std::size_t least) {
  require(given, name);
  std::size_t size = 0;
  std::memcpy(&size, given, sizeof size);
  if (size < least || size > kLargestStruct) {
    invalid(std::string(name) + "->size is " + std::to_string(size) + "; expected " +
            std::to_string(least) + " to " + std::to_string(kLargestStruct) +
            ": set it to sizeof(" + name + ")");
  }
  return size;
}

// Read options. What a newer caller set and this library does not know is refused, not ignored.
template <typename Struct>
Struct read_sized(const Struct* given, const char* name, std::size_t least) {
  const std::size_t size = checked_size(given, name, least);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t at = sizeof(Struct); at < size; ++at) {
    if (bytes[at] != 0) {
      throw Failure(SPECRT_UNSUPPORTED, std::string(name) +
                                            " sets what this library does not know; set it to "
                                            "zero, or use a newer library");
    }
  }
  Struct known{};
  std::memcpy(&known, given, std::min(size, sizeof(Struct)));
  return known;
}

// Write results after the caller's `size`, which stays.
template <typename Struct>
void write_sized(Struct* out, const Struct& result, const char* name, std::size_t least) {
  const std::size_t size = std::min(checked_size(out, name, least), sizeof(Struct));
  std::memcpy(reinterpret_cast<unsigned char*>(out) + sizeof(std::size_t),
              reinterpret_cast<const unsigned char*>(&result) + sizeof(std::size_t),
              size - sizeof(std::size_t));
}

}  // namespace specrt::abi
