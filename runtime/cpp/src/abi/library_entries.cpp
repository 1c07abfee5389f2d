// The functions of specrt.h that are about the library.
#include <string>

#include "abi/call.hpp"
#include "abi/entries.hpp"
#include "abi/log.hpp"

using namespace specrt::abi;

namespace {

void close_generators() {
  for (const auto& [handle, object] : handles().all()) {
    if (auto generator = std::dynamic_pointer_cast<Generator>(object)) generator->close();
  }
}

std::string version() {
  try {
    return SPECRT_VERSION " " + specrt::implementation_name();
  } catch (...) {
    return SPECRT_VERSION;
  }
}

}  // namespace

int32_t specrt_abi_version(void) { return SPECRT_ABI_VERSION; }

const char* specrt_version(void) {
  static const std::string* const text = new std::string(version());  // read while a process exits
  return text->c_str();
}

const char* specrt_last_error(void) { return last_error(); }

const char* specrt_status_name(specrt_status status) {
  switch (status) {
    case SPECRT_OK:
      return "SPECRT_OK";
    case SPECRT_INVALID_ARGUMENT:
      return "SPECRT_INVALID_ARGUMENT";
    case SPECRT_CLOSED:
      return "SPECRT_CLOSED";
    case SPECRT_BUSY:
      return "SPECRT_BUSY";
    case SPECRT_BUNDLE:
      return "SPECRT_BUNDLE";
    case SPECRT_ENGINE:
      return "SPECRT_ENGINE";
    case SPECRT_CAPACITY:
      return "SPECRT_CAPACITY";
    case SPECRT_UNSUPPORTED:
      return "SPECRT_UNSUPPORTED";
    case SPECRT_CANCELLED:
      return "SPECRT_CANCELLED";
    case SPECRT_CALLBACK:
      return "SPECRT_CALLBACK";
    case SPECRT_INTERNAL:
      return "SPECRT_INTERNAL";
    case SPECRT_MEMORY:
      return "SPECRT_MEMORY";
    default:
      return "a status there is not";
  }
}

specrt_status specrt_set_log(specrt_log log, void* user) {
  set_log(log, user);
  return SPECRT_OK;
}

specrt_status specrt_shutdown(void) {
  try {
    const specrt::LockRelease lock;
    shut_down_after_calls(close_generators, [] {
      handles().take_all();
      specrt::shut_down();
    });
    return SPECRT_OK;
  } catch (...) {
    return caught();
  }
}
