#include "abi/handles.hpp"

#include <limits>
#include <string>
#include <utility>

#include "abi/arguments.hpp"

namespace specrt::abi {

namespace {

constexpr unsigned kKindBits = 2;
constexpr Handle kKindMask = (Handle{1} << kKindBits) - 1;

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kGenerator:
      return "generator";
    case Kind::kSession:
      return "session";
    case Kind::kParams:
      return "params";
  }
  return "handle";
}

std::string remedy(Kind kind) {
  switch (kind) {
    case Kind::kGenerator:
      return "pass what specrt_open gave";
    case Kind::kSession:
      return "pass what specrt_session_create gave";
    case Kind::kParams:
      return "pass what specrt_params_create gave";
  }
  return "";
}

[[noreturn]] void closed(Kind kind) {
  const std::string also = kind == Kind::kSession ? ", or its generator was" : "";
  throw Failure(SPECRT_CLOSED, std::string("this ") + name_of(kind) + " was closed" + also + "; " +
                                   remedy(kind) + ", before it is closed");
}

}  // namespace

Handles& handles() {
  static Handles* const table = new Handles;
  return *table;
}

Handle Handles::add(Kind kind, std::shared_ptr<Object> object) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (last_ >= (std::numeric_limits<Handle>::max() >> kKindBits)) {
    throw Failure(SPECRT_INTERNAL, "no handle is left in this process; start it again");
  }
  const Handle handle = ((last_ + 1) << kKindBits) | static_cast<Handle>(kind);
  open_.emplace(handle, std::move(object));
  ++last_;
  return handle;
}

void Handles::check(Kind kind, Handle handle) const {
  const std::string name = name_of(kind);
  if (handle == 0) invalid(name + " is NULL; " + remedy(kind));
  const Handle number = handle >> kKindBits;
  const auto result = static_cast<Kind>(handle & kKindMask);
  const bool given_out = number >= 1 && number <= last_ && (handle & kKindMask) != 0;
  if (!given_out) invalid(name + " is not a handle of this library; " + remedy(kind));
  if (result != kind)
    invalid(name + " is the handle of a " + name_of(result) + "; " + remedy(kind));
}

std::shared_ptr<Object> Handles::find(Kind kind, Handle handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check(kind, handle);
  const auto entry = open_.find(handle);
  if (entry == open_.end()) closed(kind);
  return entry->second;
}

std::shared_ptr<Object> Handles::take(Kind kind, Handle handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check(kind, handle);
  const auto entry = open_.find(handle);
  if (entry == open_.end()) closed(kind);
  std::shared_ptr<Object> object = std::move(entry->second);
  open_.erase(entry);
  return object;
}

std::shared_ptr<Object> Handles::peek(Handle handle) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = open_.find(handle);
  return entry == open_.end() ? nullptr : entry->second;
}

void Handles::drop(Handle handle) noexcept {
  std::shared_ptr<Object> object;  // ends without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = open_.find(handle);
  if (entry == open_.end()) return;
  object = std::move(entry->second);
  open_.erase(entry);
}

std::unordered_map<Handle, std::shared_ptr<Object>> Handles::take_all() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(open_, {});
}

std::unordered_map<Handle, std::shared_ptr<Object>> Handles::all() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return open_;
}

}  // namespace specrt::abi
