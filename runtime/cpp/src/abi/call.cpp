#include "abi/call.hpp"

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <string_view>
#include <system_error>
#include <utility>

#include "abi/log.hpp"
#include "abi/text.hpp"

namespace specrt::abi {

namespace {

enum class Life { kOpen, kEnding, kEnded };

struct Running {
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t calls = 0;
  Life life = Life::kOpen;
};

// Lives to the very end of the process: threads may call while it exits.
Running& running() {
  static Running* const state = new Running;
  return *state;
}

thread_local int depth = 0;  // calls of this thread that run, callbacks within them included
thread_local std::fenv_t* of_application = nullptr;  // outside of the call that runs

// A buffer and no string: it takes no memory when there is none, and may be read while the thread
// ends.
constexpr std::size_t kLongestMessage = 2048;
thread_local char message[kLongestMessage];

specrt_status keep(specrt_status status, std::string_view text) noexcept {
  const std::size_t length = whole_prefix(text, kLongestMessage - 1);
  for (std::size_t at = 0; at < length; ++at) {
    const bool space = text[at] == '\n' || text[at] == '\r' || text[at] == '\0';
    message[at] = space ? ' ' : text[at];
  }
  message[length] = '\0';
  if (status != SPECRT_CANCELLED) log(SPECRT_LOG_ERROR, message);
  return status == SPECRT_OK ? SPECRT_INTERNAL : status;
}

}  // namespace

Call::Call(bool ends) {
  Running& state = running();
  std::unique_lock<std::mutex> lock(state.mutex);
  if (ends && depth == 0) state.changed.wait(lock, [&] { return state.life != Life::kEnding; });
  if (state.life != Life::kOpen) {
    throw Failure(SPECRT_CLOSED,
                  "specrt was shut down in this process, and nothing can be done with it any more; "
                  "call specrt_shutdown last");
  }
  ++state.calls;
  ++depth;
}

Call::~Call() {
  Running& state = running();
  const std::lock_guard<std::mutex> lock(state.mutex);
  --depth;
  --state.calls;
  state.changed.notify_all();
}

FloatingPoint::FloatingPoint() noexcept : outer_(std::exchange(of_application, &application_)) {
  std::fegetenv(&application_);
  std::fesetenv(FE_DFL_ENV);
}

FloatingPoint::~FloatingPoint() {
  std::fesetenv(&application_);
  of_application = outer_;
}

Outside::Outside() noexcept {
  ++depth;
  std::fegetenv(&library_);
  if (of_application != nullptr) std::fesetenv(of_application);
}

Outside::~Outside() {
  if (of_application != nullptr) std::fegetenv(of_application);
  std::fesetenv(&library_);
  --depth;
}

specrt_status caught() noexcept {
  try {
    throw;
  } catch (const Failure& failure) {
    return keep(failure.status(), failure.what());
  } catch (const std::bad_alloc&) {
    return keep(SPECRT_MEMORY, "not enough memory; close what is not needed, or raise the limit");
  } catch (const std::system_error& error) {
    const bool starved = error.code() == std::errc::resource_unavailable_try_again ||
                         error.code() == std::errc::not_enough_memory;
    if (!starved) return keep(SPECRT_INTERNAL, error.what());
    return keep(SPECRT_MEMORY,
                "the system gives no thread; end what is not needed, or raise the limit");
  } catch (const std::exception& error) {
    return keep(SPECRT_INTERNAL, error.what());
  } catch (...) {
    return keep(SPECRT_INTERNAL, "something was thrown that is not a std::exception");
  }
}

const char* last_error() noexcept { return message; }

void shut_down_after_calls(const std::function<void()>& stop, const std::function<void()>& end) {
  Running& state = running();
  std::unique_lock<std::mutex> lock(state.mutex);
  if (depth > 0) {
    throw Failure(SPECRT_BUSY,
                  "specrt_shutdown was called inside a callback, whose generation still runs; "
                  "cancel it, and call specrt_shutdown after it has returned");
  }
  if (state.life != Life::kOpen) {
    state.changed.wait(lock, [&] { return state.life == Life::kEnded; });
    return;
  }
  state.life = Life::kEnding;
  lock.unlock();
  const auto ended = [&] {
    const std::lock_guard<std::mutex> again(state.mutex);
    state.life = Life::kEnded;
    state.changed.notify_all();
  };
  try {
    stop();
    lock.lock();
    state.changed.wait(lock, [&] { return state.calls == 0; });
    lock.unlock();
    end();
  } catch (...) {
    ended();
    throw;
  }
  ended();
}

}  // namespace specrt::abi
