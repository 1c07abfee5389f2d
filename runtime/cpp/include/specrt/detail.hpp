// How specrt.hpp crosses the C interface: handles with an owner, and exceptions that wait while C
// is on the stack. No part of what applications use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "specrt/specrt.h"
#include "specrt/types.hpp"

namespace specrt {
inline namespace v1 {
namespace detail {

inline void check(specrt_status status) {
  if (status != SPECRT_OK) throw Error(status, specrt_last_error());
}

// A text without bytes may have no address.
inline const char* address(std::string_view text) { return text.empty() ? "" : text.data(); }

inline Chunk view(const specrt_chunk& chunk) {
  return {{chunk.text, chunk.bytes}, {chunk.ids, chunk.count}, chunk.accepted, chunk.generation};
}

template <typename Function>
std::vector<Logprobs> copied_logprobs(Function function, specrt_session* session) {
  const specrt_logprobs* all = nullptr;
  std::size_t count = 0;
  check(function(session, &all, &count));
  std::vector<Logprobs> copy;
  for (std::size_t i = 0; i < count; ++i)
    copy.emplace_back(all[i].entries, all[i].entries + all[i].count);
  return copy;
}

// Owns a handle of C.
template <typename Handle, specrt_status (*Close)(Handle*)>
class Owner {
 public:
  Owner() = default;
  ~Owner() { Close(handle_); }
  Owner(Owner&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Owner& operator=(Owner&& other) noexcept {
    if (this != &other) {
      Close(handle_);
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  Handle* get() const { return handle_; }
  Handle** out() { return &handle_; }
  void close() noexcept { Close(std::exchange(handle_, nullptr)); }

 private:
  Handle* handle_ = nullptr;
};

using Processors = std::vector<std::shared_ptr<const LogitsProcessor>>;

// The log of the application, which stays until another one takes its place.
class Logger {
 public:
  static Logger& only() {
    static Logger* const logger = new Logger;  // threads may call while the process exits
    return *logger;
  }
  void set(Log log) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto next = log ? std::make_unique<Log>(std::move(log)) : nullptr;
    check(specrt_set_log(next ? &run : nullptr, next.get()));
    log_ = std::move(next);
  }

 private:
  static void run(void* log, std::int32_t level, const char* message) {
    (*static_cast<Log*>(log))(level, message);
  }
  std::mutex mutex_;
  std::unique_ptr<Log> log_;
};

// A processor as one generation calls it, and what it threw there; any thread may run it, and it
// may end the stream that owns this.
class Hook : public std::enable_shared_from_this<Hook> {
 public:
  explicit Hook(std::shared_ptr<const LogitsProcessor> processor)
      : processor_(std::move(processor)) {}

  static std::int32_t run(void* self, const std::int64_t* ids, std::size_t count, float* scores,
                          std::size_t vocabulary) {
    const auto held = static_cast<Hook*>(self)->shared_from_this();
    Hook& hook = *held;
    try {
      (*hook.processor_)(Tokens(ids, count), scores, vocabulary);
      return 0;
    } catch (...) {
      const std::lock_guard<std::mutex> lock(hook.mutex_);
      hook.thrown_ = std::current_exception();
      return 1;
    }
  }
  void rethrow() {
    std::exception_ptr thrown;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      thrown = std::exchange(thrown_, nullptr);  // thrown once
    }
    if (thrown) std::rethrow_exception(thrown);
  }

 private:
  std::shared_ptr<const LogitsProcessor> processor_;
  std::mutex mutex_;
  std::exception_ptr thrown_;
};

using Hooks = std::vector<std::shared_ptr<Hook>>;

// What one generation is begun with: parameters, and hooks of its own for their processors.
class Hooked {
 public:
  Hooked(specrt_params* params, const Processors& processors) : params_(params) {
    if (processors.empty()) return;
    check(specrt_params_copy(params, copy_.out()));
    params_ = copy_.get();
    for (const auto& processor : processors) {
      hooks_.push_back(std::make_shared<Hook>(processor));
      check(specrt_params_add_processor(params_, &Hook::run, hooks_.back().get()));
    }
  }
  specrt_params* params() const { return params_; }
  const Hooks& hooks() const { return hooks_; }

 private:
  Owner<specrt_params, specrt_params_close> copy_;
  specrt_params* params_;
  Hooks hooks_;
};

// How a generation ended: not at all or of itself, or with what the application threw, or an error.
inline bool went_on(specrt_status status, const Hooks& hooks) {
  if (status == SPECRT_OK) return true;
  if (status == SPECRT_CANCELLED) return false;
  const Error error(status, specrt_last_error());
  if (status == SPECRT_CALLBACK) {
    for (const auto& hook : hooks) hook->rethrow();
  }
  throw error;
}

// A callback on its way through C: what it throws waits here.
template <typename Function>
struct Caller {
  Function& function;
  std::exception_ptr thrown;
  std::string text;  // of all chunks: another thread may close the session, and with it its own

  static std::int32_t run(void* self, const specrt_chunk* chunk) {
    auto& caller = *static_cast<Caller*>(self);
    try {
      caller.text.append(chunk->text, chunk->bytes);
      if constexpr (std::is_void_v<std::invoke_result_t<Function&, const Chunk&>>) {
        caller.function(view(*chunk));
        return 0;
      } else {
        return caller.function(view(*chunk)) ? 0 : 1;
      }
    } catch (...) {
      caller.thrown = std::current_exception();
      return 1;
    }
  }
};

}  // namespace detail

}  // namespace v1
}  // namespace specrt
