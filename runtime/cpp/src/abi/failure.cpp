#include "failure.hpp"

#include <algorithm>
#include <iterator>

namespace specrt {

namespace {

// What libraries and the system write where there is no memory.
constexpr const char* kShortages[] = {
    "bad_alloc",
    "bad allocation",
    "failed to map segment",
    "Cannot allocate memory",
    "Failed to allocate memory",
    "MemoryError",
    "can't start new thread",
};

}  // namespace

Failure failure_of(specrt_status status, const std::string& what, const std::string& reason,
                   const std::string& remedy) {
  const std::string told = what + " (" + reason + "); ";
  const auto is_in = [&](const char* words) { return reason.find(words) != std::string::npos; };
  if (std::any_of(std::begin(kShortages), std::end(kShortages), is_in)) {
    return Failure(SPECRT_MEMORY,
                   told +
                       "not enough memory: free some, raise the limit of `ulimit -v` if there is "
                       "one, or take a smaller bundle");
  }
  const bool lacks_files = is_in("Too many open files");
  return Failure(status, told + (lacks_files ? "too many files are open: close some, or allow more "
                                               "with `ulimit -n 1024`"
                                             : remedy));
}

}  // namespace specrt
