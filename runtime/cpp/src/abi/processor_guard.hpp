// A logits processor of the application, as implementations call it.
//
// It may be called on the thread of another session, whose pass runs both, while its own session
// ends: so a caller can own it too, and its end waits for a call that runs.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "abi/outside.hpp"
#include "params.hpp"

namespace specrt::abi {

class ProcessorGuard {
 public:
  // What it throws or returns goes to `error`.
  ProcessorGuard(const Processor& processor, std::shared_ptr<CallbackError> error)
      : processor_(processor), error_(std::move(error)) {}

  // Whether this thread runs one.
  static bool is_within() noexcept;

  // What an implementation is given in place of the processor.
  Processor guarded() { return {&run, this, &hold}; }

  // Call the application no more. Waits for a call that runs on another thread, but within a call
  // of a processor, which that one may wait for.
  void disarm() noexcept;

  // Called as a specrt_processor; never throws.
  static std::int32_t run(void* self, const std::int64_t* ids, std::size_t count, float* scores,
                          std::size_t vocabulary) noexcept;
  static void hold(void* self, std::int32_t by) noexcept;  // by one owner more, or less

 private:
  std::mutex mutex_;  // held while it is called
  std::atomic<bool> armed_{true};
  const Processor processor_;
  const std::shared_ptr<CallbackError> error_;
  std::atomic<std::int32_t> owners_{1};
};

struct LetGo {
  void operator()(ProcessorGuard* guard) const noexcept {
    guard->disarm();
    ProcessorGuard::hold(guard, -1);
  }
};

// Disarmed once nobody holds it.
using HeldProcessor = std::shared_ptr<ProcessorGuard>;

}  // namespace specrt::abi
