// A logits processor of the application, as Python calls it.
//
// Python may still be in a pass that uses it when the session is closed, so that both own it; and
// an exception of the application must not run into Python's frames.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "params.hpp"

namespace specrt::hosted {

class Guard {
 public:
  explicit Guard(const Processor& processor) : processor_(processor) {}

  // Call the application no more; waits for a call that runs on another thread.
  void disarm();

  // What the application threw; "" where it did not.
  std::string error();

  // Both have the shape that Python's side expects; `self` is a Guard.
  static std::int32_t call(void* self, const std::int64_t* ids, std::size_t count, float* scores,
                           std::size_t vocabulary) noexcept;
  static void hold(void* self, std::int32_t by) noexcept;  // by one owner more, or less

 private:
  std::int32_t run(const std::int64_t* ids, std::size_t count, float* scores,
                   std::size_t vocabulary);

  std::recursive_mutex mutex_;  // a session may be closed by its own processor
  Processor processor_;
  std::string error_;
  std::atomic<int> owners_{1};
};

struct LetGo {
  void operator()(Guard* guard) const noexcept { Guard::hold(guard, -1); }
};

// The guards of one generation.
class Guards {
 public:
  explicit Guards(const std::vector<Processor>& processors);
  Guards(Guards&&) = default;
  Guards& operator=(Guards&&) = delete;
  ~Guards();

  // What Python is told of them, as JSON: [[function, user, hold], ...].
  std::string json() const;
  std::string error() const;

 private:
  std::vector<std::unique_ptr<Guard, LetGo>> guards_;
};

}  // namespace specrt::hosted
