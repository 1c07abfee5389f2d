// The TensorRT library that is linked in, and what it says while it works.
#pragma once

#include <NvInfer.h>

#include <array>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

namespace specrt::native::tensorrt {

// Major, minor, patch and build of a version; 0 for what it does not say.
using Version = std::array<int, 4>;
Version parse_version(std::string_view text);

// One of the two libraries, as the headers say which.
struct Library {
  const char* backend;
  const char* title;
  Version version;

  std::string version_text() const;
  std::string name() const { return title + (" " + version_text()); }
};
const Library& library();
// What people call the library of a backend; the backend itself where it is none of the two.
std::string title_of(const std::string& backend);

// Keeps what TensorRT says that failed. TensorRT keeps the first logger it sees for as long as the
// process lives, and calls it from threads of its own: so there is one, and it is never destroyed.
class Journal final : public nvinfer1::ILogger {
 public:
  static Journal& instance();

  void log(Severity severity, nvinfer1::AsciiChar const* text) noexcept override;
  // The first line of the oldest error since the last call, this thread's before any other's, or
  // "no reason given". Forgets this thread's.
  std::string drain();

 private:
  struct Line {
    std::thread::id thread;
    std::string text;
  };
  std::mutex mutex_;
  std::deque<Line> errors_;
};

}  // namespace specrt::native::tensorrt
