// Functions of the application, which may throw, stop a generation, or call the library again.
#pragma once

#include <mutex>
#include <optional>
#include <string>

#include "abi/call.hpp"
#include "params.hpp"

namespace specrt::abi {

// Why a function of the application ended a generation. Passes may run on another thread.
class CallbackError {
 public:
  void set(const std::string& message);
  std::optional<std::string> get() const;
  void clear();

 private:
  mutable std::mutex mutex_;
  std::optional<std::string> message_;
};

// A logits processor that never throws: what it threw or returned is kept instead.
struct GuardedProcessor {
  Processor processor;
  CallbackError* error;

  static std::int32_t run(void* self, const std::int64_t* ids, std::size_t count, float* scores,
                          std::size_t vocabulary);
};

// Tell of a chunk; sets the error where the callback threw.
std::int32_t tell(specrt_callback callback, void* user, const specrt_chunk& chunk,
                  CallbackError& error);

}  // namespace specrt::abi
