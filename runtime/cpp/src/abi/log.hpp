// What an operator would want to read, told to the application.
#pragma once

#include <cstdint>

#include "specrt/specrt.h"

namespace specrt::abi {

void set_log(specrt_log log, void* user);
bool has_log();

// Without a lock of the library. What the application does in there cannot fail a call.
void log(std::int32_t level, const char* message) noexcept;

}  // namespace specrt::abi
