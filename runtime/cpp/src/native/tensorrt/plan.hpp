// A deserialised plan: its tensors, its profiles, and contexts that run it.
#pragma once

#include <NvInfer.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "native/tensorrt/context.hpp"
#include "native/tensorrt/cuda.hpp"
#include "native/tensorrt/record.hpp"

namespace specrt::native::tensorrt {

// One input or output of a plan; a size of -1 is given with each pass.
struct Tensor {
  std::vector<std::int64_t> shape;
  nvinfer1::DataType type;
  bool is_input;
};

// Weights are loaded once, for any number of contexts. Any thread; GPU 0 must be current.
class CompiledPlan {
 public:
  // Throws Failure(SPECRT_ENGINE) saying why the plan cannot run here, and what to do.
  CompiledPlan(const std::string& path, const EngineRecord& record);

  const std::string& path() const { return path_; }
  const std::map<std::string, Tensor>& tensors() const { return tensors_; }
  int profiles() const;
  // The least, best and largest size of an input's last dimension in a profile.
  Range range(int profile, const std::string& input) const;
  // The working memory that is enough for every profile.
  std::size_t scratch_bytes() const;
  // The input that an output is written into, as the plan says; empty for none.
  std::string alias(const std::string& output) const;

  // A context of one profile, with working memory at an address. Contexts that never run at once
  // may share it.
  std::unique_ptr<Context> context(int profile, void* scratch, const Stream& stream);

 private:
  void describe();
  void stream_weights();
  bool is_fixed(int profile) const;

  std::string path_;
  std::unique_ptr<nvinfer1::IRuntime> runtime_;  // outlives the engine, as that its contexts
  std::unique_ptr<nvinfer1::ICudaEngine> engine_;
  std::map<std::string, Tensor> tensors_;
  std::mutex making_;
  Kernels kernels_;
};

}  // namespace specrt::native::tensorrt
