// Handles are numbers in the shape of pointers: never followed, never used twice.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "failure.hpp"

namespace specrt::abi {

enum class Kind : std::uintptr_t { kGenerator = 1, kSession = 2, kParams = 3 };

using Handle = std::uintptr_t;

// What a handle stands for.
class Object {
 public:
  virtual ~Object() = default;
};

class Handles {
 public:
  Handle add(Kind kind, std::shared_ptr<Object> object);
  // What a handle stands for; throws Failure where it is NULL, closed, or of another kind.
  std::shared_ptr<Object> find(Kind kind, Handle handle);
  // The same, and the handle is closed from now on.
  std::shared_ptr<Object> take(Kind kind, Handle handle);
  // What a handle stands for; nothing where it was closed already.
  std::shared_ptr<Object> peek(Handle handle) noexcept;
  void drop(Handle handle) noexcept;
  // Everything that is open, closed from now on.
  std::unordered_map<Handle, std::shared_ptr<Object>> take_all();
  // What is open, for a shutdown to close.
  std::unordered_map<Handle, std::shared_ptr<Object>> all();

 private:
  void check(Kind kind, Handle handle) const;

  std::mutex mutex_;
  Handle last_ = 0;  // how many were given out
  std::unordered_map<Handle, std::shared_ptr<Object>> open_;
};

// Those of this process. Lives to its very end: threads may call while it exits.
Handles& handles();

template <typename T>
Handle handle_of(T* pointer) {
  return reinterpret_cast<Handle>(pointer);
}

}  // namespace specrt::abi
