// Functions of the application, which may throw, stop a generation, or call the library again.
#pragma once

#include <cstdint>
#include <exception>
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

 private:
  mutable std::mutex mutex_;
  std::optional<std::string> message_;
};

// What a function of the application returns; 1, and an error, where it throws.
template <typename Function>
std::int32_t guarded_call(const char* what, CallbackError& error, Function function) {
  const Outside outside;
  try {
    return function();
  } catch (const std::exception& thrown) {
    error.set(std::string(what) + " threw: " + thrown.what());
  } catch (...) {
    error.set(std::string(what) + " threw something that is not a std::exception");
  }
  return 1;
}

// Tell of a chunk; sets the error where the callback threw.
std::int32_t tell(specrt_callback callback, void* user, const specrt_chunk& chunk,
                  CallbackError& error);

}  // namespace specrt::abi
