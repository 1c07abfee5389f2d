#include "abi/log.hpp"

#include <mutex>
#include <new>

#include "abi/call.hpp"

namespace specrt::abi {

namespace {

struct Logger {
  // Held while the function is called, so that nothing calls one that was replaced.
  std::recursive_mutex mutex;
  specrt_log function = nullptr;
  void* user = nullptr;
  bool is_called = false;
};

// Lives to the very end of the process, where threads may still call; takes no memory when there is
// none.
Logger& logger() {
  alignas(Logger) static unsigned char place[sizeof(Logger)];
  static Logger* const only = new (place) Logger;
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
