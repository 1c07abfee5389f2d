#include "hosted/libpython.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "failure.hpp"
#include "hosted/configured.hpp"

extern char** environ;

namespace specrt::hosted {
namespace {

class Pipe {
 public:
  Pipe() {
    if (pipe2(ends_, O_CLOEXEC) != 0) {
      throw failure_of(SPECRT_ENGINE, "no pipe to Python could be made", strerror(errno),
                       "open the bundle again");
    }
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  ~Pipe() {
    close(ends_[0]);
    close_writer();
  }

  int writer() const { return ends_[1]; }

  void close_writer() {
    if (ends_[1] >= 0) close(ends_[1]);
    ends_[1] = -1;
  }

  std::string read_all() const {
    std::string text;
    char buffer[512];
    for (;;) {
      const ssize_t count = read(ends_[0], buffer, sizeof buffer);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return text;
      text.append(buffer, static_cast<std::size_t>(count));
    }
  }

 private:
  int ends_[2] = {-1, -1};
};

class FileActions {
 public:
  FileActions() { posix_spawn_file_actions_init(&actions_); }
  FileActions(const FileActions&) = delete;
  FileActions& operator=(const FileActions&) = delete;
  ~FileActions() { posix_spawn_file_actions_destroy(&actions_); }
  posix_spawn_file_actions_t* get() { return &actions_; }

 private:
  posix_spawn_file_actions_t actions_;
};

// So that no module is taken from where the application happens to run.
constexpr char kElsewhere[] = "import sys; sys.path = [path for path in sys.path if path]\n";

// What of the environment decides how Python starts.
std::string environment() {
  std::string text;
  for (const char* name : {"PYTHONHOME", "PYTHONPATH"}) {
    const char* value = std::getenv(name);
    if (value != nullptr)
      text += (text.empty() ? " with " : ", ") + std::string(name) + "=" + value;
  }
  return text;
}

// Run the interpreter once, as it will run here; the library that it names. Python ends the process
// where it cannot start, such as for a wrong PYTHONHOME: so it is tried in another one.
std::string ask(std::string interpreter) {
  Pipe pipe;
  FileActions actions;
  posix_spawn_file_actions_adddup2(actions.get(), pipe.writer(), STDOUT_FILENO);
  posix_spawn_file_actions_addopen(actions.get(), STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(actions.get(), STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  std::string command = "-c", question = std::string(kElsewhere) + kQuestion;
  char* const arguments[] = {interpreter.data(), command.data(), question.data(), nullptr};
  pid_t child = 0;
  const int problem =
      posix_spawn(&child, interpreter.c_str(), actions.get(), nullptr, arguments, environ);
  if (problem != 0) {
    throw failure_of(SPECRT_INVALID_ARGUMENT,
                     "python is '" + interpreter + "', which cannot be run", strerror(problem),
                     "expected the path of an interpreter");
  }
  pipe.close_writer();
  std::string output = pipe.read_all();
  while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  if (output.find('\n') == std::string::npos) {
    throw Failure(SPECRT_ENGINE, "the Python at " + interpreter + " does not start" +
                                     environment() + "; expected an interpreter that runs: `" +
                                     interpreter + " -c pass` says what is wrong");
  }
  return output.substr(0, output.find('\n'));
}

}  // namespace

Python find_python(const std::string& interpreter) {
  const std::string program = interpreter.empty() ? kPython : interpreter;
  Python python{program, ask(program)};
  if (python.library.empty()) {
    throw Failure(SPECRT_ENGINE,
                  "the Python at " + python.interpreter +
                      " has no shared library to load; name an interpreter that has one (built "
                      "with --enable-shared) as `python` of specrt_open_options, or build this "
                      "library for one with -DSPECRT_PYTHON=PATH");
  }
  return python;
}

}  // namespace specrt::hosted
