#include "native/tensorrt/plan.hpp"

#include <algorithm>

#include "failure.hpp"
#include "native/tensorrt/file.hpp"
#include "native/tensorrt/library.hpp"

namespace specrt::native::tensorrt {

namespace {

std::string here_again() {
  return std::string("; build it again here: `specrt build RECIPE --backend ") + library().backend +
         "`";
}

std::unique_ptr<nvinfer1::IRuntime> start() {
  Journal& journal = Journal::instance();
  journal.drain();
  std::unique_ptr<nvinfer1::IRuntime> runtime(nvinfer1::createInferRuntime(journal));
  if (!runtime)
    throw Failure(SPECRT_ENGINE, library().name() + " does not start: " + journal.drain() +
                                     "; `specrt doctor` tells what this machine has");
  return runtime;
}

// Say what TensorRT for RTX finds wrong with a plan; empty where the library does not tell.
std::string invalidity([[maybe_unused]] nvinfer1::IRuntime& runtime,
                       [[maybe_unused]] const MappedFile& file) {
  std::string all;
#ifdef TRT_MAJOR_RTX
  using Finding = nvinfer1::EngineInvalidityDiagnostics;
  constexpr std::pair<Finding, const char*> kReasons[] = {
      {Finding::kVERSION_MISMATCH, "it was built by another version of the library"},
      {Finding::kUNSUPPORTED_CC, "it was not built for this GPU's compute capability"},
      {Finding::kOLD_CUDA_DRIVER, "the CUDA driver is too old"},
      {Finding::kOLD_CUDA_RUNTIME, "the CUDA runtime is too old"},
      {Finding::kINSUFFICIENT_GPU_MEMORY, "the GPU has too little memory"},
      {Finding::kMALFORMED_ENGINE, "the file is damaged"},
      {Finding::kCUDA_ERROR, "the CUDA driver or runtime does not work"},
  };
  std::uint64_t found = 0;
  runtime.getEngineValidity(file.data(), static_cast<std::int64_t>(file.size()), &found);
  for (const auto& [bit, reason] : kReasons)
    if ((found & static_cast<std::uint64_t>(bit)) != 0)
      all += (all.empty() ? " (" : ", ") + std::string(reason);
  if (!all.empty()) all += ")";
#endif
  return all;
}

std::unique_ptr<nvinfer1::ICudaEngine> deserialised(nvinfer1::IRuntime& runtime,
                                                    const std::string& path,
                                                    const MappedFile& file) {
  Journal& journal = Journal::instance();
  journal.drain();
  std::unique_ptr<nvinfer1::ICudaEngine> engine(
      runtime.deserializeCudaEngine(file.data(), file.size()));
  if (engine) return engine;
  const std::string said = journal.drain(), end = lost(said);
  std::string why = invalidity(runtime, file);
  std::size_t free = 0, total = 0;
  if (said.find("emory") != std::string::npos && cudaMemGetInfo(&free, &total) == cudaSuccess)
    why = " (a plan of " + shown_bytes(file.size()) + ", and " + shown_bytes(free) + " of " +
          shown_bytes(total) + " are free on the GPU)";
  throw Failure(SPECRT_ENGINE, library().name() + " cannot open " + path + " on this GPU: " + said +
                                   why + (end.empty() ? here_again() : end));
}

// Plans of libraries before 10.15 alias nothing, and their headers do not have the question.
template <class Engine>
auto aliased(const Engine& engine, const char* name, int)
    -> decltype(engine.getAliasedInputTensor(name)) {
  return engine.getAliasedInputTensor(name);
}
template <class Engine>
const char* aliased(const Engine&, const char*, long) {
  return nullptr;
}

bool is_known(nvinfer1::DataType type) {
  using nvinfer1::DataType;
  constexpr DataType kKnown[] = {DataType::kFLOAT, DataType::kHALF, DataType::kBF16,
                                 DataType::kINT64};
  return std::find(std::begin(kKnown), std::end(kKnown), type) != std::end(kKnown);
}

}  // namespace

CompiledPlan::CompiledPlan(const std::string& path, const EngineRecord& record)
    : path_(path), kernels_(path) {
  const MappedFile file(path);
  check_header(path, file);
  runtime_ = start();
#ifndef TRT_MAJOR_RTX
  // Such a plan brings a runtime of its own, for later versions of the library.
  if (record.newer_versions) runtime_->setEngineHostCodeAllowed(true);
#endif
  engine_ = deserialised(*runtime_, path, file);
  if (record.streaming) stream_weights();
  describe();
}

void CompiledPlan::describe() {
  for (int i = 0; i < engine_->getNbIOTensors(); ++i) {
    const char* name = engine_->getIOTensorName(i);
    Tensor tensor{{},
                  engine_->getTensorDataType(name),
                  engine_->getTensorIOMode(name) == nvinfer1::TensorIOMode::kINPUT};
    const nvinfer1::Dims dims = engine_->getTensorShape(name);
    for (int d = 0; d < dims.nbDims; ++d) tensor.shape.push_back(dims.d[d]);
    if (!is_known(tensor.type))
      throw Failure(SPECRT_ENGINE, path_ + ": tensor " + name + " has element type " +
                                       std::to_string(static_cast<int>(tensor.type)) +
                                       "; expected fp32, fp16, bf16 or int64" + here_again());
    if (engine_->getTensorLocation(name) != nvinfer1::TensorLocation::kDEVICE)
      throw Failure(SPECRT_ENGINE, path_ + ": tensor " + name +
                                       " is wanted in host memory; no graph of specrt has such a "
                                       "tensor" +
                                       here_again());
    tensors_.emplace(name, std::move(tensor));
  }
}

// Keep as many weights on the device as fit; what is refused leaves the budget as it was.
void CompiledPlan::stream_weights() {
  Journal::instance().drain();
  const std::int64_t budget = engine_->getWeightStreamingAutomaticBudget();
  const bool taken = engine_->setWeightStreamingBudgetV2(budget);
  if (taken && engine_->getWeightStreamingBudgetV2() == budget) return;
  throw Failure(SPECRT_ENGINE, library().name() + " cannot stream the weights of " + path_ +
                                   " with " + std::to_string(budget) +
                                   " bytes of them on the GPU: " + Journal::instance().drain() +
                                   "; close what else uses it, or build without weight_streaming");
}

int CompiledPlan::profiles() const { return engine_->getNbOptimizationProfiles(); }

Range CompiledPlan::range(int profile, const std::string& input) const {
  const auto size = [&](nvinfer1::OptProfileSelector which) -> std::size_t {
    const nvinfer1::Dims dims = engine_->getProfileShape(input.c_str(), profile, which);
    const std::int64_t last = dims.nbDims < 1 ? 0 : dims.d[dims.nbDims - 1];
    return last < 0 ? 0 : static_cast<std::size_t>(last);
  };
  return {size(nvinfer1::OptProfileSelector::kMIN), size(nvinfer1::OptProfileSelector::kOPT),
          size(nvinfer1::OptProfileSelector::kMAX)};
}

std::size_t CompiledPlan::scratch_bytes() const {
  std::int64_t most = 0;
  for (int i = 0; i < profiles(); ++i)
    most = std::max(most, engine_->getDeviceMemorySizeForProfileV2(i));
  return static_cast<std::size_t>(most);
}

std::string CompiledPlan::alias(const std::string& output) const {
  const char* input = aliased(*engine_, output.c_str(), 0);
  return input == nullptr ? "" : input;
}

bool CompiledPlan::is_fixed(int profile) const {
  return std::all_of(tensors_.begin(), tensors_.end(), [&](const auto& named) {
    const auto& shape = named.second.shape;
    const bool varies = std::count(shape.begin(), shape.end(), -1) != 0;
    return !named.second.is_input || !varies || range(profile, named.first).fixed();
  });
}

std::unique_ptr<Context> CompiledPlan::context(int profile, void* scratch, const Stream& stream) {
  const std::string name = "profile " + std::to_string(profile) + " of " + path_;
  const std::lock_guard<std::mutex> lock(making_);
  Journal::instance().drain();
  auto made = kernels_.context(*engine_, is_fixed(profile), name);
  if (!made) {
    const std::string said = Journal::instance().drain(), end = lost(said);
    throw Failure(SPECRT_ENGINE, name + " gets no context: " + said +
                                     (end.empty() ? "; close what else uses the GPU" : end));
  }
  made->choose(profile, stream);
  const std::int64_t needed = engine_->getDeviceMemorySizeForProfileV2(profile);
  if (needed > 0) made->scratch(scratch, static_cast<std::size_t>(needed));
  return made;
}

}  // namespace specrt::native::tensorrt
