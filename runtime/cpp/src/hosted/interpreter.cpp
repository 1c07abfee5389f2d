#include "hosted/interpreter.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include "failure.hpp"

namespace specrt::hosted {
namespace {

constexpr char kNoPython[] = "the Python of this process has ended; open bundles in a new process";

void* open_library(const Python& python) {
  // Extension modules look for Python's functions in the process, so they must be visible there.
  void* library = dlopen(python.library.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    throw failure_of(SPECRT_ENGINE, python.library + " cannot be loaded",
                     reason == nullptr ? "no reason given" : reason,
                     "name an interpreter that is there as `python` of specrt_open_options");
  }
  return library;
}

}  // namespace

Interpreter& Interpreter::get() {
  static Interpreter& only = *new Interpreter;
  return only;
}

bool Interpreter::usable() const noexcept {
  const State state = state_;
  return (state == State::kFound || state == State::kStarted) && process_ == getpid() &&
         api_.Py_IsInitialized() != 0;
}

void Interpreter::check() const {
  if (usable()) return;
  const int process = process_;
  if (process != 0 && process != getpid()) {
    throw Failure(SPECRT_UNSUPPORTED,
                  "this process was forked from one that had opened a bundle; fork first and open "
                  "then, or start a new program");
  }
  throw Failure(SPECRT_CLOSED, kNoPython);
}

void Interpreter::require(const std::string& python) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (state_ != State::kNone) {
    check();
    return;
  }
  const bool here = dlsym(RTLD_DEFAULT, "Py_IsInitialized") != nullptr;
  if (here) {
    api_ = look_up(RTLD_DEFAULT);
    if (api_.Py_IsInitialized() != 0) {
      process_ = getpid();
      state_ = State::kFound;
      return;
    }
  }
  const Python found = find_python(python);
  if (!here) api_ = look_up(open_library(found));
  if (api_.Py_IsInitialized() != 0) {  // the application had loaded it out of sight
    process_ = getpid();
    state_ = State::kFound;
    return;
  }
  start(found, lock);
}

}  // namespace specrt::hosted
