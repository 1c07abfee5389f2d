// Models of the backends tensorrt and tensorrt-rtx; compiled only where TENSORRT_ROOT is given.
//
// Compiled and run against doubles of both libraries only: nothing here has run on a GPU.
// No CUDA graphs and no rounds in one launch: every pass is launched kernel by kernel, and waited
// for. The hosted implementation has both.
#pragma once

#include <memory>
#include <string>

#include "native/bundle.hpp"

namespace specrt::native {

// Open the plan of a model on GPU 0. Throws Failure: SPECRT_BUNDLE for a record that cannot be
// read; SPECRT_UNSUPPORTED for what only the hosted implementation runs; SPECRT_ENGINE where the
// library, the GPU or the plan is not what the record says.
std::shared_ptr<Model> open_tensorrt(const Bundle& bundle, const ModelRecord& model);

// The library that this one was built with, such as "TensorRT 10.13.3.9".
std::string tensorrt_library();

}  // namespace specrt::native
