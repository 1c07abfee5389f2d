// One way to run a plan, in one profile: shapes and addresses stay until they are set again.
#pragma once

#include <NvInfer.h>

#include <initializer_list>
#include <memory>
#include <string>

#include "native/tensorrt/cuda.hpp"

namespace specrt::native::tensorrt {

// Throws Failure(SPECRT_ENGINE) from every method, saying what was being done.
class Context {
 public:
#ifdef TRT_MAJOR_RTX
  std::unique_ptr<nvinfer1::IRuntimeConfig> config;  // outlives the context, which may use it
#endif

  Context(std::unique_ptr<nvinfer1::IExecutionContext> made, std::string name)
      : context_(std::move(made)), name_(std::move(name)) {}

  void choose(int profile, const Stream& stream);
  void scratch(void* memory, std::size_t bytes);
  void shape(const char* input, std::initializer_list<std::size_t> sizes);
  void address(const char* tensor, void* place);
  void enqueue(const Stream& stream);

 private:
  [[noreturn]] void refused(const std::string& what) const;

  std::unique_ptr<nvinfer1::IExecutionContext> context_;
  std::string name_;
};

// How contexts come by their kernels. TensorRT has them in the plan. TensorRT for RTX makes them
// when it meets a shape: where a profile has one size that is done at once; where the width varies,
// a pass must not wait for a compiler, nor round otherwise once one is done. What was made is
// shared by the contexts of a plan, and read from the file that the hosted implementation keeps
// beside it; here none is written.
class Kernels {
 public:
  explicit Kernels(const std::string& plan) : plan_(plan) {}
  // nullptr where TensorRT refuses; its journal says why.
  std::unique_ptr<Context> context(nvinfer1::ICudaEngine& engine, bool fixed, std::string name);

 private:
  std::string plan_;
#ifdef TRT_MAJOR_RTX
  void attach(nvinfer1::IRuntimeConfig& config);
  std::unique_ptr<nvinfer1::IRuntimeCache> cache_;
#endif
};

}  // namespace specrt::native::tensorrt
