#include "hosted/guard.hpp"

#include <exception>

namespace specrt::hosted {
namespace {

template <typename Pointer>
std::string address(Pointer pointer) {
  return std::to_string(reinterpret_cast<std::uintptr_t>(pointer));
}

}  // namespace

void Guard::disarm() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  processor_.function = nullptr;
}

std::string Guard::error() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return error_;
}

std::int32_t Guard::call(void* self, const std::int64_t* ids, std::size_t count, float* scores,
                         std::size_t vocabulary) noexcept {
  return static_cast<Guard*>(self)->run(ids, count, scores, vocabulary);
}

std::int32_t Guard::run(const std::int64_t* ids, std::size_t count, float* scores,
                        std::size_t vocabulary) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (processor_.function == nullptr) return 1;  // nobody waits for the text any more
  try {
    return processor_.function(processor_.user, ids, count, scores, vocabulary);
  } catch (const std::exception& error) {
    error_ = std::string("a logits processor threw: ") + error.what();
  } catch (...) {
    error_ = "a logits processor threw what is no std::exception";
  }
  return 1;
}

void Guard::hold(void* self, std::int32_t by) noexcept {
  Guard* guard = static_cast<Guard*>(self);
  if (guard->owners_.fetch_add(by) + by == 0) delete guard;
}

Guards::Guards(const std::vector<Processor>& processors) {
  guards_.reserve(processors.size());
  for (const Processor& processor : processors) guards_.emplace_back(new Guard(processor));
}

Guards::~Guards() {
  for (const auto& guard : guards_) {
    if (guard) guard->disarm();
  }
}

std::string Guards::json() const {
  std::string text;
  for (const auto& guard : guards_) {
    text += text.empty() ? "[" : ",[";
    text += address(&Guard::call) + ',' + address(guard.get()) + ',' + address(&Guard::hold) + ']';
  }
  return '[' + text + ']';
}

std::string Guards::error() const {
  for (const auto& guard : guards_) {
    std::string said = guard->error();
    if (!said.empty()) return said;
  }
  return "";
}

}  // namespace specrt::hosted
