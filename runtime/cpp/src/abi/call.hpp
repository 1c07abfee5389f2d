// What every function of the interface does around its work: count itself among the calls that
// run, compute as programs do by default, turn what is thrown into a status, and keep its message.
#pragma once

#include <cfenv>
#include <functional>

#include "implementation.hpp"

namespace specrt::abi {

// Floating point without traps, to the nearest: what an application sets for itself would end the
// process where a weight becomes infinite, or change what is drawn.
class FloatingPoint {
 public:
  FloatingPoint() noexcept;
  ~FloatingPoint();
  FloatingPoint(const FloatingPoint&) = delete;
  FloatingPoint& operator=(const FloatingPoint&) = delete;

 private:
  std::fenv_t application_;
  std::fenv_t* outer_;
};

// A call that runs. Throws Failure(SPECRT_CLOSED) once the library was shut down: one that `ends`
// what runs does so when that is at its end.
class Call {
 public:
  explicit Call(bool ends);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 private:
  const LockRelease lock_;
  const FloatingPoint floating_;
};

// The same thread runs code of the application in the middle of a call.
class Outside {
 public:
  Outside() noexcept;
  ~Outside();
  Outside(const Outside&) = delete;
  Outside& operator=(const Outside&) = delete;

 private:
  std::fenv_t library_;
};

// Turn what is being thrown into a status, and keep its message; to be called in a handler.
specrt_status caught() noexcept;

const char* last_error() noexcept;

// Run once all calls have returned; none begins meanwhile or afterwards. `stop` makes them end.
// Throws Failure(SPECRT_BUSY) inside a call. A second one waits for the first, and does nothing.
void shut_down_after_calls(const std::function<void()>& stop, const std::function<void()>& end);

// The one way into the library.
template <typename Body>
specrt_status guarded(Body&& body, bool ends = false) noexcept {
  try {
    const Call call(ends);
    body();
    return SPECRT_OK;
  } catch (...) {
    return caught();
  }
}

}  // namespace specrt::abi
