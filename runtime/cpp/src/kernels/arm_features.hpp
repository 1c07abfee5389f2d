// Where an Arm processor says what instructions it has.
#pragma once

#if defined(__APPLE__)
#include <sys/sysctl.h>

#include <cstddef>

namespace specrt::kernels {

inline bool is_reported(const char* name) {
  int value = 0;
  std::size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

}  // namespace specrt::kernels
#else
#include <sys/auxv.h>
#endif
