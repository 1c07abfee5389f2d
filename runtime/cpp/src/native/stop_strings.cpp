#include "native/stop_strings.hpp"

#include <algorithm>
#include <utility>

namespace specrt::native {

namespace {

// The length of the longest end of a text that begins the stop string, and is not all of it. Both
// are whole characters, so that what is cut is, too.
std::size_t overlap(const std::string& text, const std::string& stop) {
  std::size_t length = std::min(text.size(), stop.size() - 1);
  while (length > 0 && text.compare(text.size() - length, length, stop, 0, length) != 0) {
    --length;
  }
  return length;
}

}  // namespace

StopStrings::Shown StopStrings::push(const std::string& text) {
  if (stops_.empty()) {
    return {text, std::nullopt};
  }
  held_ += text;
  const std::string* met = nullptr;
  std::size_t first = std::string::npos;
  for (const std::string& stop : stops_) {
    const std::size_t at = held_.find(stop);
    if (at < first || (at == first && met != nullptr && stop < *met)) {
      first = at;
      met = &stop;
    }
  }
  if (met != nullptr) {
    Shown shown{held_.substr(0, first), *met};
    held_.clear();
    return shown;
  }
  std::size_t keep = 0;
  for (const std::string& stop : stops_) {
    keep = std::max(keep, overlap(held_, stop));
  }
  Shown shown{held_.substr(0, held_.size() - keep), std::nullopt};
  held_.erase(0, held_.size() - keep);
  return shown;
}

std::string StopStrings::finish() { return std::exchange(held_, std::string()); }

}  // namespace specrt::native
