#include "native/engine/tensorrt/library.hpp"

#include <algorithm>

#include "native/engine/backends.hpp"

namespace specrt::native {

std::string tensorrt_library() { return tensorrt::library().name(); }

namespace tensorrt {

namespace {

constexpr std::size_t kKept = 32, kLongest = 400;

constexpr const char* kTensorRt = "TensorRT";
constexpr const char* kRtx = "TensorRT for RTX";

std::string first_line(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string_view::npos) return "";
  text.remove_prefix(begin);
  return std::string(text.substr(0, std::min(text.find_first_of("\r\n"), kLongest)));
}

}  // namespace

Version parse_version(std::string_view text) {
  Version version{};
  for (int& part : version) {
    std::size_t digits = 0;
    while (digits < text.size() && digits < 9 && text[digits] >= '0' && text[digits] <= '9')
      part = part * 10 + (text[digits++] - '0');
    if (digits == 0 || digits == text.size() || text[digits] != '.') return version;
    text.remove_prefix(digits + 1);
  }
  return version;
}

std::string Library::version_text() const {
  std::string text = std::to_string(version[0]);
  for (std::size_t i = 1; i < version.size(); ++i) text += "." + std::to_string(version[i]);
  return text;
}

const Library& library() {
#ifdef TRT_MAJOR_RTX
  constexpr const char* kBackend = "tensorrt-rtx";
#else
  constexpr const char* kBackend = "tensorrt";
#endif
  static const std::string title = title_of(kBackend);
  static const Library result{kBackend,
                              title.c_str(),
                              {getInferLibMajorVersion(), getInferLibMinorVersion(),
                               getInferLibPatchVersion(), getInferLibBuildVersion()}};
  return result;
}

std::string title_of(const std::string& backend) {
  return backend == "tensorrt" ? kTensorRt : backend == "tensorrt-rtx" ? kRtx : backend;
}

Journal& Journal::instance() {
  static Journal* const only = new Journal;
  return *only;
}

void Journal::log(Severity severity, nvinfer1::AsciiChar const* text) noexcept {
  if (severity > Severity::kERROR || text == nullptr) return;
  try {
    Line line{std::this_thread::get_id(), first_line(text)};
    const std::lock_guard<std::mutex> lock(mutex_);
    errors_.push_back(std::move(line));
    if (errors_.size() > kKept) errors_.pop_front();
  } catch (...) {
    return;  // no memory for a message: the failure is reported without one
  }
}

std::string Journal::drain() {
  const std::thread::id ours = std::this_thread::get_id();
  const auto is_ours = [ours](const Line& line) { return line.thread == ours; };
  const std::lock_guard<std::mutex> lock(mutex_);
  auto first = std::find_if(errors_.begin(), errors_.end(), is_ours);
  if (first == errors_.end()) first = errors_.begin();
  const std::string line = first == errors_.end() ? "" : first->text;
  errors_.erase(std::remove_if(errors_.begin(), errors_.end(), is_ours), errors_.end());
  return line.empty() ? "no reason given" : line;
}

}  // namespace tensorrt

}  // namespace specrt::native
