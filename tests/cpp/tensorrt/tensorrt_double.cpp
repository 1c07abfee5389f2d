// A TensorRT whose plans are JSON after 24 bytes of header.
#include <cstring>

#include "tensorrt/double.hpp"

namespace specrt::doubles {

namespace {

ILogger* logger = nullptr;

bool refuse(const std::string& said) {
  logger->log(ILogger::Severity::kWARNING, "a warning that nobody asked for");
  logger->log(ILogger::Severity::kERROR, (said + "\nand a second line").c_str());
  return false;
}

class Context final : public IExecutionContext {
 public:
  explicit Context(std::shared_ptr<const Plan> plan) : plan_(std::move(plan)) {}

  bool setOptimizationProfileAsync(int32_t profileIndex, cudaStream_t stream) noexcept override {
    if (fails("setOptimizationProfileAsync")) return refuse(machine.said);
    if (stream == nullptr) broken("a profile without a stream");
    if (profileIndex < 0 || profileIndex >= static_cast<int>(plan_->spec.profiles.size()))
      return refuse("no such profile");
    profile_ = profileIndex;
    return true;
  }

  bool setInputShape(char const* tensorName, Dims const& dims) noexcept override {
    if (profile_ < 0) broken("a shape before the profile");
    const std::string name = tensorName;
    const bool is_width = name == "input_ids";
    if (!is_width && name != "rows") return refuse(name + " has one shape");
    if (dims.nbDims != (is_width ? 2 : 1))
      return refuse(name + " has another number of dimensions");
    const auto& sizes = plan_->spec.profiles[static_cast<std::size_t>(profile_)];
    const std::int64_t size = dims.d[dims.nbDims - 1];
    const std::size_t first = is_width ? 0 : 3;
    if (size < sizes[first] || size > sizes[first + 2])
      return refuse(name + " is out of the profile's range");
    (is_width ? width_ : rows_) = static_cast<std::size_t>(size);
    return true;
  }

  bool setTensorAddress(char const* tensorName, void* data) noexcept override {
    if (fails("setTensorAddress")) return refuse(machine.said);
    if (plan_->tensors.count(tensorName) == 0) return refuse("no such tensor");
    if (reinterpret_cast<std::uintptr_t>(data) % 256 != 0) broken("an address that is not aligned");
    at_[tensorName] = on_device(data, 1);
    return true;
  }

  void setDeviceMemoryV2(void* memory, int64_t size) noexcept override {
    scratch_ = on_device(memory, static_cast<std::size_t>(size));
    scratch_bytes_ = static_cast<std::size_t>(size);
  }

  bool enqueueV3(cudaStream_t stream) noexcept override {
    if (fails("enqueueV3")) return refuse(machine.said);
    if (at_.size() != plan_->tensors.size()) broken("not every tensor has an address");
    if (width_ == 0 || rows_ == 0) broken("a pass without shapes");
    if (scratch_bytes_ < plan_->spec.needs(profile_)) broken("too little working memory");
    last_profile() = profile_;
    auto pass = std::make_shared<Pass>(plan_, at_, width_, rows_);
    enqueue(stream, [pass, scratch = scratch_, bytes = scratch_bytes_] {
      if (bytes != 0) std::memset(on_device(scratch, bytes), 0xA5, bytes);
      pass->run();
    });
    return true;
  }

 private:
  std::shared_ptr<const Plan> plan_;
  int profile_ = -1;
  std::size_t width_ = 0, rows_ = 0, scratch_bytes_ = 0;
  void* scratch_ = nullptr;
  std::map<std::string, void*> at_;
  Alive alive_;
};

#ifdef STAND_IN_RTX
class Cache final : public IRuntimeCache {
 public:
  bool deserialize(void const* blob, size_t size) noexcept override {
    return std::string(static_cast<const char*>(blob), size) == "kernels";
  }

 private:
  Alive alive_;
};

class Config final : public IRuntimeConfig {
 public:
  void setExecutionContextAllocationStrategy(
      ExecutionContextAllocationStrategy strategy) noexcept override {
    ours = strategy == ExecutionContextAllocationStrategy::kUSER_MANAGED;
  }
  void setDynamicShapesKernelSpecializationStrategy(
      DynamicShapesKernelSpecializationStrategy strategy) noexcept override {
    lazy = strategy == DynamicShapesKernelSpecializationStrategy::kLAZY;
  }
  bool setCudaGraphStrategy(CudaGraphStrategy) noexcept override { return true; }
  IRuntimeCache* createRuntimeCache() const noexcept override { return new Cache; }
  bool setRuntimeCache(IRuntimeCache const&) noexcept override { return true; }

  bool ours = false, lazy = true;

 private:
  Alive alive_;
};
#endif

class Engine final : public ICudaEngine {
 public:
  explicit Engine(std::shared_ptr<const Plan> plan) : plan_(std::move(plan)) {}

  int32_t getNbIOTensors() const noexcept override { return static_cast<int>(plan_->names.size()); }
  char const* getIOTensorName(int32_t index) const noexcept override {
    return plan_->names.at(static_cast<std::size_t>(index)).c_str();
  }
  Dims getTensorShape(char const* tensorName) const noexcept override {
    return dims_of(tensor(tensorName).shape);
  }
  DataType getTensorDataType(char const* tensorName) const noexcept override {
    return tensor(tensorName).type;
  }
  TensorLocation getTensorLocation(char const* tensorName) const noexcept override {
    const bool there = plan_->on_host && std::string(tensorName) == "rows";
    return there ? TensorLocation::kHOST : TensorLocation::kDEVICE;
  }
  TensorIOMode getTensorIOMode(char const* tensorName) const noexcept override {
    return tensor(tensorName).is_input ? TensorIOMode::kINPUT : TensorIOMode::kOUTPUT;
  }
  Dims getProfileShape(char const* tensorName, int32_t profileIndex,
                       OptProfileSelector select) const noexcept override {
    std::vector<std::int64_t> shape = tensor(tensorName).shape;
    const bool is_rows = std::string(tensorName) == "rows";
    const auto& sizes = plan_->spec.profiles.at(static_cast<std::size_t>(profileIndex));
    if (shape.back() < 0)
      shape.back() = sizes[static_cast<std::size_t>(select) + (is_rows ? 3 : 0)];
    return dims_of(shape);
  }
  int32_t getNbOptimizationProfiles() const noexcept override {
    return static_cast<int>(plan_->spec.profiles.size());
  }
  int64_t getDeviceMemorySizeForProfileV2(int32_t profileIndex) const noexcept override {
    return static_cast<std::int64_t>(plan_->spec.needs(profileIndex));
  }
  bool setWeightStreamingBudgetV2(int64_t gpuMemoryBudget) noexcept override {
    if (fails("setWeightStreamingBudgetV2")) return refuse(machine.said);
    budget_ = gpuMemoryBudget;
    return true;
  }
  int64_t getWeightStreamingBudgetV2() const noexcept override { return budget_; }
  int64_t getWeightStreamingAutomaticBudget() const noexcept override { return 4096; }
#ifdef STAND_IN_ALIASES
  char const* getAliasedInputTensor(char const* tensorName) const noexcept override {
    const auto found = plan_->aliases.find(tensorName);
    return found == plan_->aliases.end() ? nullptr : found->second.c_str();
  }
#endif
#ifdef STAND_IN_RTX
  IRuntimeConfig* createRuntimeConfig() noexcept override { return new Config; }
  IExecutionContext* createExecutionContext(IRuntimeConfig* runtimeConfig) noexcept override {
    const auto* config = static_cast<const Config*>(runtimeConfig);
    if (config->lazy) broken("kernels that change while a text is generated");
    return made(config->ours);
  }
#else
  IExecutionContext* createExecutionContext(
      ExecutionContextAllocationStrategy strategy) noexcept override {
    return made(strategy == ExecutionContextAllocationStrategy::kUSER_MANAGED);
  }
#endif

 private:
  IExecutionContext* made(bool ours) const {
    if (!ours) broken("a context that takes memory by itself");
    if (fails("createExecutionContext")) return refuse(machine.said), nullptr;
    return new Context(plan_);
  }
  const Tensor& tensor(char const* name) const { return plan_->tensors.at(name); }
  static Dims dims_of(const std::vector<std::int64_t>& shape) {
    Dims dims{};
    for (const std::int64_t size : shape) dims.d[dims.nbDims++] = size;
    return dims;
  }

  std::shared_ptr<const Plan> plan_;
  std::int64_t budget_ = 0;
  Alive alive_;
};

class Runtime final : public IRuntime {
 public:
  ICudaEngine* deserializeCudaEngine(void const* blob, std::size_t size) noexcept override {
    if (fails("deserializeCudaEngine")) return refuse(machine.said), nullptr;
    const std::string text(static_cast<const char*>(blob) + 24, size - 24);
    return new Engine(plan_of(native::Json::parse(text)));
  }
#ifdef STAND_IN_RTX
  EngineValidity getEngineValidity(void const*, int64_t,
                                   uint64_t* diagnostics) const noexcept override {
    *diagnostics = static_cast<uint64_t>(EngineInvalidityDiagnostics::kUNSUPPORTED_CC);
    return EngineValidity::kINVALID;
  }
#else
  void setEngineHostCodeAllowed(bool) noexcept override {}
#endif

 private:
  Alive alive_;
};

}  // namespace

}  // namespace specrt::doubles

namespace nvinfer1 {

IRuntime* createInferRuntime(ILogger& theirs) noexcept {
  using namespace specrt::doubles;
  if (specrt::doubles::logger == nullptr)
    specrt::doubles::logger = &theirs;  // the first one is kept
  if (fails("createInferRuntime")) return refuse(machine.said), nullptr;
  return new Runtime;
}

}  // namespace nvinfer1

extern "C" {
int32_t getInferLibMajorVersion() noexcept { return specrt::doubles::machine.version[0]; }
int32_t getInferLibMinorVersion() noexcept { return specrt::doubles::machine.version[1]; }
int32_t getInferLibPatchVersion() noexcept { return specrt::doubles::machine.version[2]; }
int32_t getInferLibBuildVersion() noexcept { return specrt::doubles::machine.version[3]; }
}
