// Whether a plan was built for the library and the GPU that are here.
#pragma once

#include <string>

#include "native/tensorrt/cuda.hpp"
#include "native/tensorrt/library.hpp"
#include "native/tensorrt/record.hpp"

namespace specrt::native::tensorrt {

// What keeps a plan from running here and how to rebuild it; empty where nothing does. The rules
// are those of specrt.engines.tensorrt.fingerprint.difference; the driver does not matter.
std::string difference(const EngineRecord& built, const Library& here, const Gpu& gpu);

}  // namespace specrt::native::tensorrt
