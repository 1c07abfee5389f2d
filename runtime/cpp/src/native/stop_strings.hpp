// Where a text must end.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace specrt::native {

// Finds where a text must end, holding back what may be the beginning of a stop string.
class StopStrings {
 public:
  explicit StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  struct Shown {
    std::string text;                // what may be shown
    std::optional<std::string> met;  // the stop string that ended it
  };

  Shown push(const std::string& text);
  // Return what was held back, when no stop string came.
  std::string finish();

 private:
  std::vector<std::string> stops_;
  std::string held_;
};

}  // namespace specrt::native
