// What tuning found out about a bundle on one machine, where it holds here.
#pragma once

#include <optional>
#include <string>

#include "native/bundle.hpp"

namespace specrt::native {

// The tuning beside a manifest, or why the one that is there is not used; neither where there is
// none. `library` is what runs the target, such as "onnxruntime 1.31.1".
struct FoundTuning {
  std::optional<Tuning> tuning;
  std::optional<std::string> notice;
};
FoundTuning read_tuning(const std::string& folder, const Manifest& manifest, int threads,
                        const std::string& library);

}  // namespace specrt::native
