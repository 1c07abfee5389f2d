#include "abi/outside.hpp"

namespace specrt::abi {

void CallbackError::set(const std::string& message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!message_) message_ = message;
}

std::optional<std::string> CallbackError::get() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return message_;
}

std::int32_t tell(specrt_callback callback, void* user, const specrt_chunk& chunk,
                  CallbackError& error) {
  return guarded_call("the callback", error, [&] { return callback(user, &chunk); });
}

}  // namespace specrt::abi
