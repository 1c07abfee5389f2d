#include "abi/outside.hpp"

#include <exception>

namespace specrt::abi {

namespace {

// What a function returns; 1, and an error, where it throws.
template <typename Function>
std::int32_t guarded_call(const char* what, CallbackError& error, Function function) {
  const Outside outside;
  try {
    return function();
  } catch (const std::exception& thrown) {
    error.set(std::string(what) + " threw: " + thrown.what());
  } catch (...) {
    error.set(std::string(what) + " threw something that is no std::exception");
  }
  return 1;
}

}  // namespace

void CallbackError::set(const std::string& message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!message_) message_ = message;
}

std::optional<std::string> CallbackError::get() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return message_;
}

void CallbackError::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  message_.reset();
}

std::int32_t GuardedProcessor::run(void* self, const std::int64_t* ids, std::size_t count,
                                   float* scores, std::size_t vocabulary) {
  const auto& guarded = *static_cast<const GuardedProcessor*>(self);
  const std::int32_t returned = guarded_call("a logits processor", *guarded.error, [&] {
    return guarded.processor.function(guarded.processor.user, ids, count, scores, vocabulary);
  });
  if (returned != 0) {  // where it threw, that came first
    guarded.error->set("a logits processor returned " + std::to_string(returned) +
                       "; expected 0 to go on");
  }
  return returned;
}

std::int32_t tell(specrt_callback callback, void* user, const specrt_chunk& chunk,
                  CallbackError& error) {
  return guarded_call("the callback", error, [&] { return callback(user, &chunk); });
}

}  // namespace specrt::abi
