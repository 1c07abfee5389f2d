// The life of an interpreter that is started here.
//
// Python ends only on the thread that started it, and applications come and go with theirs: so it
// gets a thread that starts it, waits, and ends it.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include "failure.hpp"
#include "hosted/interpreter.hpp"

namespace specrt::hosted {
namespace {

// Keeps signals of the application from being delivered to a thread that is begun meanwhile.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

void Interpreter::start(const Python& python, std::unique_lock<std::mutex>& lock) {
  up_ = false;
  problem_.clear();
  {
    NoSignals quiet;
    thread_ = std::thread([this, program = python.interpreter] { live(program); });
  }
  changed_.wait(lock, [this] { return up_ || !problem_.empty(); });
  if (!up_) {
    thread_.join();
    throw Failure(SPECRT_ENGINE, "the Python at " + python.interpreter + " did not start (" +
                                     problem_ + "); expected an interpreter that runs");
  }
  process_ = getpid();
  state_ = State::kStarted;
}

void Interpreter::live(const std::string& program) {
  std::string problem = initialise(program);
  // Python ends once the thread has ended that imported this first: so that is this thread, and not
  // one of the application, which may wait for the end.
  if (problem.empty()) api_.Py_DecRef(api_.PyImport_ImportModule("threading"));
  PyThreadState* own = problem.empty() ? api_.PyEval_SaveThread() : nullptr;
  std::unique_lock<std::mutex> lock(mutex_);
  up_ = problem.empty();
  problem_ = std::move(problem);
  const bool up = up_;
  changed_.notify_all();
  if (!up) return;
  changed_.wait(lock, [this] { return stopping_; });
  lock.unlock();
  api_.PyEval_RestoreThread(own);
  api_.Py_FinalizeEx();
}

std::string Interpreter::initialise(const std::string& program) const {
  if (api_.Py_SetProgramName == nullptr || api_.Py_DecodeLocale == nullptr) {
    return initialise_from_config(program);
  }
  // Python keeps the name, so that it is not given back.
  const wchar_t* name = api_.Py_DecodeLocale(program.c_str(), nullptr);
  if (name == nullptr) return "its path cannot be decoded";
  api_.Py_SetProgramName(name);
  api_.Py_InitializeEx(0);  // 0: signals stay the application's
  return "";
}

std::string Interpreter::initialise_from_config(const std::string& program) const {
  if (api_.PyInitConfig_Create == nullptr) return "it cannot be told where its packages are";
  PyInitConfig* config = api_.PyInitConfig_Create();
  if (config == nullptr) return "there is no memory";
  // Settings that are not named here leave signals, arguments and the locale alone.
  const bool up = api_.PyInitConfig_SetInt(config, "use_environment", 1) == 0 &&
                  api_.PyInitConfig_SetInt(config, "user_site_directory", 1) == 0 &&
                  api_.PyInitConfig_SetInt(config, "install_signal_handlers", 0) == 0 &&
                  api_.PyInitConfig_SetStr(config, "program_name", program.c_str()) == 0 &&
                  api_.Py_InitializeFromInitConfig(config) == 0;
  std::string problem;
  if (!up) {
    const char* reason = nullptr;
    api_.PyInitConfig_GetError(config, &reason);
    problem = reason == nullptr ? "no reason given" : reason;
  }
  api_.PyInitConfig_Free(config);
  return problem;
}

void Interpreter::stop() {
  std::unique_lock<std::mutex> lock(mutex_);
  const State before = state_.exchange(State::kEnded);
  if (before != State::kStarted || process_ != getpid()) return;
  stopping_ = true;
  changed_.notify_all();
  lock.unlock();
  thread_.join();
}

}  // namespace specrt::hosted
