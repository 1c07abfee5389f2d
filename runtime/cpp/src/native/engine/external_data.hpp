// Which files an ONNX graph takes its tensors from besides its own.
#pragma once

#include <set>
#include <string>
#include <string_view>

namespace specrt::native {

// The locations of external data in a serialized ONNX model, wherever in it they are. Throws
// std::runtime_error for what is no such model.
std::set<std::string> external_data(std::string_view model);

}  // namespace specrt::native
