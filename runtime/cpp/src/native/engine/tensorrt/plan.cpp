#include "native/engine/tensorrt/plan.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "failure.hpp"
#include "native/engine/tensorrt/library.hpp"
#include "native/engine/tensorrt/record.hpp"
#include "native/text/json.hpp"

namespace specrt::native::tensorrt {

namespace {

// Where a plan of TensorRT for RTX keeps its own length; seen in plans of 1.7.1.
constexpr std::size_t kRtxSize = 16;

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw Failure(SPECRT_ENGINE, path + " " + what + "; " + kAgain);
}

std::string backend_of(const std::string& mark) {
  if (mark == "ptrt" || mark == "ftrt") return "tensorrt";
  return mark == "vtrt" ? "tensorrt-rtx" : "";
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat info{};
  if (file < 0 || fstat(file, &info) != 0 || !S_ISREG(info.st_mode)) {
    const std::string why = file < 0 ? std::strerror(errno) : "it is not a file";
    if (file >= 0) close(file);
    refuse(path, "cannot be read (" + why + ")");
  }
  size_ = static_cast<std::size_t>(info.st_size);
  if (size_ != 0) data_ = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
  const std::string why = data_ == MAP_FAILED ? std::strerror(errno) : "";
  close(file);
  if (!why.empty()) refuse(path, "cannot be read (" + why + ")");
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(data_, size_);
}

void check_header(const std::string& path, const MappedFile& file) {
  const Library& ours = library();
  const std::string mark(file.data() ? file.data() : "", std::min<std::size_t>(file.size(), 4));
  const std::string backend = backend_of(mark);
  if (backend.empty())
    refuse(path, "is damaged or no TensorRT plan: it " +
                     (mark.empty() ? "is empty" : "begins with " + quoted(mark)));
  if (backend != ours.backend)
    refuse(path,
           "is a plan of " + title_of(backend) + "; this libspecrt was built with " + ours.name());
  if (backend != "tensorrt-rtx" || file.size() < kRtxSize + sizeof(std::uint64_t)) return;
  std::uint64_t length = 0;  // least byte first, as every machine that has such a GPU
  std::memcpy(&length, file.data() + kRtxSize, sizeof length);
  if (file.size() < length)
    refuse(path, "is damaged: " + std::to_string(file.size()) + " bytes of " +
                     std::to_string(length) + " are there");
}

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
  std::string message;
  for (const std::size_t size : sizes) {
    dims.d[dims.nbDims++] = static_cast<std::int64_t>(size);
    message += (message.empty() ? "" : ", ") + std::to_string(size);
  }
  if (!context_->setInputShape(input, dims))
    refused("does not take shape (" + message + ") for input " + input);
}

void Context::address(const char* tensor, void* place) {
  if (!context_->setTensorAddress(tensor, place))
    refused(std::string("does not take the address given for ") + tensor);
}

void Context::enqueue(const Stream& stream) {
  if (!context_->enqueueV3(stream.handle())) refused("does not run");
}

void Context::refused(const std::string& what) const {
  const std::string message = Journal::instance().drain();
  const std::string end = lost(message);
  throw Failure(SPECRT_ENGINE, name_ + " " + what + ": " + message +
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
  std::unique_ptr<nvinfer1::IExecutionContext> execution(
      engine.createExecutionContext(config.get()));
  if (!execution) return nullptr;
  auto context = std::make_unique<Context>(std::move(execution), std::move(name));
  context->config = std::move(config);
  return context;
}

namespace {

constexpr off_t kMostKernels = off_t{1} << 28;

// No manifest lists kernels, which are made on the device. So they count where only this user or
// root may write them; empty where others may, and for what is not a file.
std::string read_own(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return "";
  struct stat info;
  std::string bytes;
  if (fstat(file, &info) == 0 && S_ISREG(info.st_mode) && (info.st_mode & 022) == 0 &&
      (info.st_uid == 0 || info.st_uid == geteuid()) && info.st_size <= kMostKernels) {
    bytes.resize(static_cast<std::size_t>(info.st_size));
    const ssize_t count = read(file, bytes.data(), bytes.size());
    bytes.resize(count > 0 ? static_cast<std::size_t>(count) : 0);
  }
  close(file);
  return bytes;
}

}  // namespace

// The library itself holds what it reads to its version, the GPU and the driver. Without a cache,
// or with one it refuses, kernels are made anew.
void Kernels::attach(nvinfer1::IRuntimeConfig& config) {
  if (!cache_) {
    cache_.reset(config.createRuntimeCache());
    if (!cache_) return;
    const std::string known = read_own(plan_.substr(0, plan_.rfind('.')) + ".kernels");
    if (!known.empty()) cache_->deserialize(known.data(), known.size());
  }
  config.setRuntimeCache(*cache_);
}

#else

std::unique_ptr<Context> Kernels::context(nvinfer1::ICudaEngine& engine, bool /*fixed*/,
                                          std::string name) {
  std::unique_ptr<nvinfer1::IExecutionContext> execution(engine.createExecutionContext(kOurs));
  return execution ? std::make_unique<Context>(std::move(execution), std::move(name)) : nullptr;
}

#endif

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
  std::uint64_t result = 0;
  runtime.getEngineValidity(file.data(), static_cast<std::int64_t>(file.size()), &result);
  for (const auto& [bit, reason] : kReasons)
    if ((result & static_cast<std::uint64_t>(bit)) != 0)
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
  const std::string message = journal.drain(), end = lost(message);
  std::string why = invalidity(runtime, file);
  std::size_t free = 0, total = 0;
  if (message.find("emory") != std::string::npos && cudaMemGetInfo(&free, &total) == cudaSuccess)
    why = " (a plan of " + shown_bytes(file.size()) + ", and " + shown_bytes(free) + " of " +
          shown_bytes(total) + " are free on the GPU)";
  throw Failure(SPECRT_ENGINE, library().name() + " cannot open " + path + " on this GPU: " +
                                   message + why + (end.empty() ? here_again() : end));
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
  return static_cast<std::size_t>(engine_->getDeviceMemorySizeV2());
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
  auto context = kernels_.context(*engine_, is_fixed(profile), name);
  if (!context) {
    const std::string message = Journal::instance().drain(), end = lost(message);
    throw Failure(SPECRT_ENGINE, name + " gets no context: " + message +
                                     (end.empty() ? "; close what else uses the GPU" : end));
  }
  context->choose(profile, stream);
  if (const std::size_t needed = scratch_bytes(); needed > 0) context->scratch(scratch, needed);
  return context;
}

}  // namespace specrt::native::tensorrt
