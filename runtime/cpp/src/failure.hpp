// What goes wrong inside the library; the C interface turns it into a status and a message.
#pragma once

#include <stdexcept>
#include <string>

#include "specrt/specrt.h"

namespace specrt {

class Failure : public std::runtime_error {
 public:
  Failure(specrt_status status, const std::string& message)
      : std::runtime_error(message), status_(status) {}

  specrt_status status() const noexcept { return status_; }

 private:
  specrt_status status_;
};

// A failure of a library or of the system: out of memory where its reason says so, and with another
// remedy where that is too many open files.
Failure failure_of(specrt_status status, const std::string& what, const std::string& reason,
                   const std::string& remedy);

}  // namespace specrt
