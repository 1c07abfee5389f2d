// An open bundle behind its handle.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "abi/handles.hpp"
#include "implementation.hpp"

namespace specrt::abi {

class Session;

class Generator : public Object {
 public:
  explicit Generator(std::unique_ptr<Host> host);

  Host& host() { return *host_; }
  const Info& info() const { return info_; }

  // Give a session a handle, unless this generator was closed meanwhile.
  Handle admit(std::shared_ptr<Session> session);
  void forget(Handle session);
  // Close every session; those that run end with SPECRT_CLOSED. Waits for no pass.
  void close();

 private:
  std::unique_ptr<Host> host_;
  Info info_;  // its texts are given out
  std::mutex mutex_;
  bool closed_ = false;
  std::set<Handle> sessions_;
};

// Refuse token ids that there are not.
void require_tokens(const Info& info, const std::vector<Token>& ids);

}  // namespace specrt::abi
