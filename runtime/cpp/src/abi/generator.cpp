#include "abi/generator.hpp"

#include <string>
#include <utility>

#include "abi/arguments.hpp"
#include "abi/session.hpp"

namespace specrt::abi {

Generator::Generator(std::unique_ptr<Host> host) : host_(std::move(host)), info_(host_->info()) {}

Handle Generator::admit(std::shared_ptr<Session> session) {
  // The handle is made under the lock: one that closes this generator meets it or comes before it.
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) {
    throw Failure(SPECRT_CLOSED,
                  "this generator was closed while a session was created; open the bundle again");
  }
  const Handle handle = handles().add(Kind::kSession, std::move(session));
  try {
    sessions_.insert(handle);
  } catch (...) {
    handles().drop(handle);
    throw;
  }
  return handle;
}

void Generator::forget(Handle session) {
  const std::lock_guard<std::mutex> lock(mutex_);
  sessions_.erase(session);
}

void Generator::close() {
  std::set<Handle> sessions;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    sessions.swap(sessions_);
  }
  for (const Handle handle : sessions) {
    // One that the application closes at the same time is not here any more.
    const auto session = std::static_pointer_cast<Session>(handles().peek(handle));
    if (session != nullptr) session->close();  // first: who finds the handle closed relies on it
    handles().drop(handle);
  }
}

void require_tokens(const Info& info, const std::vector<Token>& ids) {
  for (const Token id : ids) {
    if (id < 0 || id >= info.vocabulary) {
      invalid("token id " + std::to_string(id) + " is not in the vocabulary of 0 to " +
              std::to_string(info.vocabulary - 1));
    }
  }
}

}  // namespace specrt::abi
