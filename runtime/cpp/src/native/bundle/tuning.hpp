// The record of `specrt tune` next to a manifest, where it holds on this machine.
#pragma once

#include <optional>
#include <string>

#include "native/bundle/bundle.hpp"

namespace specrt::native {

// The tuning next to a manifest, or why the one that is there is not used; neither where there is
// none. `library` is what runs the target, such as "onnxruntime 1.31.1".
struct TuningResult {
  std::optional<Tuning> tuning;
  std::optional<std::string> notice;
};
TuningResult read_tuning(const std::string& folder, const Manifest& manifest, int threads,
                         const std::string& library);

}  // namespace specrt::native
