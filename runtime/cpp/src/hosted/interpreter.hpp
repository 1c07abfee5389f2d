// The one Python interpreter of this process: found running, or started on a thread of its own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "hosted/libpython.hpp"
#include "hosted/python_api.hpp"

namespace specrt::hosted {

class Interpreter {
 public:
  // Never destroyed: the process may end while the interpreter runs.
  static Interpreter& get();

  // See to it that one runs; `python` names the one to start. Throws Failure.
  void require(const std::string& python);

  // End what was started here, on the thread that started it. One that was found goes on.
  void stop();

  // Whether Python may be called: it runs, and this process is the one that opened it.
  bool usable() const noexcept;

  // Throws Failure where it is not usable.
  void check() const;

  // Whether it is the application's, and ends when that says so.
  bool found() const noexcept { return state_ == State::kFound; }

  const PythonApi& api() const noexcept { return api_; }

 private:
  enum class State { kNone, kFound, kStarted, kEnded };

  Interpreter() = default;
  void start(const Python& python, std::unique_lock<std::mutex>& lock);
  void live(const std::string& program);
  std::string initialise(const std::string& program) const;
  std::string initialise_from_config(const std::string& program) const;

  PythonApi api_;
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::thread thread_;
  bool up_ = false;
  bool stopping_ = false;
  std::string problem_;
  std::atomic<State> state_{State::kNone};
  std::atomic<int> process_{0};
};

}  // namespace specrt::hosted
