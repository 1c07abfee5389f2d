// A deserialised plan: its file, its tensors and profiles, and the contexts that run it.
#pragma once

#include <NvInfer.h>

#include <cstddef>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "native/engine/tensorrt/cuda.hpp"
#include "native/engine/tensorrt/record.hpp"

namespace specrt::native::tensorrt {

class MappedFile {
 public:
  // Throws Failure(SPECRT_ENGINE) where it cannot be read.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const char* data() const { return static_cast<const char*>(data_); }
  std::size_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

// Refuse a file that is not a plan of the library that is linked in, before TensorRT sees it.
void check_header(const std::string& path, const MappedFile& file);

// Throws Failure(SPECRT_ENGINE) from every method, saying what was being done.
class Context {
 public:
#ifdef TRT_MAJOR_RTX
  std::unique_ptr<nvinfer1::IRuntimeConfig> config;  // outlives the context, which may use it
#endif

  Context(std::unique_ptr<nvinfer1::IExecutionContext> context, std::string name)
      : context_(std::move(context)), name_(std::move(name)) {}

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
// next to it; here none is written.
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
  // The working memory that every context is given: the library wants no less than the engine's
  // own size, whatever a profile needs.
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
