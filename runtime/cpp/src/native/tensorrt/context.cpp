#include "native/tensorrt/context.hpp"

#include <fstream>
#include <iterator>

#include "failure.hpp"
#include "native/tensorrt/library.hpp"

namespace specrt::native::tensorrt {

namespace {

// Working memory is ours: the contexts of an engine share it.
constexpr auto kOurs = nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED;

}  // namespace

void Context::choose(int profile, const Stream& stream) {
  if (!context_->setOptimizationProfileAsync(profile, stream.handle())) refused("cannot be chosen");
}

void Context::scratch(void* memory, std::size_t bytes) {
  context_->setDeviceMemoryV2(memory, static_cast<std::int64_t>(bytes));
}

void Context::shape(const char* input, std::initializer_list<std::size_t> sizes) {
  nvinfer1::Dims dims{};
  std::string said;
  for (const std::size_t size : sizes) {
    dims.d[dims.nbDims++] = static_cast<std::int64_t>(size);
    said += (said.empty() ? "" : ", ") + std::to_string(size);
  }
  if (!context_->setInputShape(input, dims))
    refused("does not take shape (" + said + ") for input " + input);
}

void Context::address(const char* tensor, void* place) {
  if (!context_->setTensorAddress(tensor, place))
    refused(std::string("does not take the address given for ") + tensor);
}

void Context::enqueue(const Stream& stream) {
  if (!context_->enqueueV3(stream.handle())) refused("does not run");
}

void Context::refused(const std::string& what) const {
  const std::string said = Journal::instance().drain();
  const std::string end = lost(said);
  throw Failure(SPECRT_ENGINE, name_ + " " + what + ": " + said +
                                   (end.empty() ? "; open the bundle again, and if it fails again "
                                                  "build it again with `specrt build RECIPE`"
                                                : end));
}

#ifdef TRT_MAJOR_RTX

std::unique_ptr<Context> Kernels::context(nvinfer1::ICudaEngine& engine, bool fixed,
                                          std::string name) {
  using Strategy = nvinfer1::DynamicShapesKernelSpecializationStrategy;
  std::unique_ptr<nvinfer1::IRuntimeConfig> config(engine.createRuntimeConfig());
  if (!config) return nullptr;
  config->setExecutionContextAllocationStrategy(kOurs);
  config->setDynamicShapesKernelSpecializationStrategy(fixed ? Strategy::kEAGER : Strategy::kNONE);
  config->setCudaGraphStrategy(nvinfer1::CudaGraphStrategy::kDISABLED);
  attach(*config);
  std::unique_ptr<nvinfer1::IExecutionContext> made(engine.createExecutionContext(config.get()));
  if (!made) return nullptr;
  auto context = std::make_unique<Context>(std::move(made), std::move(name));
  context->config = std::move(config);
  return context;
}

// The library itself holds what it reads to its version, the GPU and the driver. Without a cache,
// or with one it refuses, kernels are made anew.
void Kernels::attach(nvinfer1::IRuntimeConfig& config) {
  if (!cache_) {
    cache_.reset(config.createRuntimeCache());
    if (!cache_) return;
    std::ifstream file(plan_.substr(0, plan_.rfind('.')) + ".kernels", std::ios::binary);
    const std::string known{std::istreambuf_iterator<char>(file), {}};
    if (!known.empty()) cache_->deserialize(known.data(), known.size());
  }
  config.setRuntimeCache(*cache_);
}

#else

std::unique_ptr<Context> Kernels::context(nvinfer1::ICudaEngine& engine, bool /*fixed*/,
                                          std::string name) {
  std::unique_ptr<nvinfer1::IExecutionContext> made(engine.createExecutionContext(kOurs));
  return made ? std::make_unique<Context>(std::move(made), std::move(name)) : nullptr;
}

#endif

}  // namespace specrt::native::tensorrt
