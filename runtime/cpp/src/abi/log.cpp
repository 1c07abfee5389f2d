#include "abi/log.hpp"

#include <mutex>

#include "abi/call.hpp"

namespace specrt::abi {

namespace {

struct Logger {
  std::recursive_mutex
      mutex;  // held while it is called, so that nothing calls one that was replaced
  specrt_log function = nullptr;
  void* user = nullptr;
  bool is_called = false;
};

// Lives to the very end of the process: threads may call while it exits.
Logger& logger() {
  static Logger* const only = new Logger;
  return *only;
}

}  // namespace

void set_log(specrt_log log, void* user) {
  Logger& only = logger();
  const std::lock_guard<std::recursive_mutex> lock(only.mutex);
  only.function = log;
  only.user = user;
}

bool has_log() {
  Logger& only = logger();
  const std::lock_guard<std::recursive_mutex> lock(only.mutex);
  return only.function != nullptr;
}

void log(std::int32_t level, const char* message) noexcept {
  Logger& only = logger();
  const std::lock_guard<std::recursive_mutex> lock(only.mutex);
  if (only.function == nullptr || only.is_called) return;
  only.is_called = true;
  try {
    const Outside outside;
    only.function(only.user, level, message);
  } catch (...) {  // the call that is told of goes on
  }
  only.is_called = false;
}

}  // namespace specrt::abi
