// The backends of this library: how each opens the models of a bundle.
#pragma once

#include <memory>
#include <string>

#include "native/bundle/bundle.hpp"
#include "native/engine/protocol.hpp"

namespace specrt::native {

class OrtLibrary;

// Load the models of a bundle. The draft is nullptr where there is none or no room for it. Throws
// Failure(SPECRT_ENGINE) where the engine library is missing, too old or refuses the engine.
struct Models {
  std::shared_ptr<Model> target;
  std::shared_ptr<Model> draft;
  std::string absent;  // why the draft is not opened, where there is one in the bundle
};
Models open_models(const Bundle& bundle, const OpenOptions& options, int threads);

// Bytes of the full KV buffers of a model with so many rows, and of what it leaves for a head; as a
// double, since a manifest may say anything.
double kv_bytes(const Manifest& manifest, const ModelRecord& model, int rows);

// What the engine library calls itself, such as "ONNX Runtime 1.31.1"; "" before one is loaded.
std::string engine_library();

// A graph of the CPU kernels. Throws Failure(SPECRT_ENGINE) when refused.
std::shared_ptr<Model> open_ort(const Bundle& bundle, const ModelRecord& model,
                                const OrtLibrary& library, int threads);

// Models of tensorrt and tensorrt-rtx; compiled only where TENSORRT_ROOT is given. Compiled and run
// against doubles of both libraries only: nothing here has run on a GPU. No CUDA graphs and no
// rounds in one launch: every pass is launched kernel by kernel, and waited for. The hosted
// implementation has both.
//
// Open the plan of a model on GPU 0. Throws Failure: SPECRT_BUNDLE for a record that cannot be
// read; SPECRT_UNSUPPORTED for what only the hosted implementation runs; SPECRT_ENGINE where the
// library, the GPU or the plan is not what the record says.
std::shared_ptr<Model> open_tensorrt(const Bundle& bundle, const ModelRecord& model);

// The library that this one was built with, such as "TensorRT 10.13.3.9".
std::string tensorrt_library();

}  // namespace specrt::native
