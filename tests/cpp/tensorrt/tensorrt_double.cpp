// A TensorRT whose plans are JSON after 24 bytes of header, all of them of one model.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>

#include "json.hpp"
#include "tensorrt/double.hpp"

namespace specrt::doubles {

using namespace nvinfer1;

int& last_profile() {
  thread_local int profile = -1;
  return profile;
}

static std::uint64_t mixed(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

std::vector<float> scores_after(const Id* tokens, std::size_t count, std::size_t vocabulary) {
  std::uint64_t state = 1;
  for (std::size_t i = 0; i < count; ++i)
    state = mixed(state + static_cast<std::uint64_t>(tokens[i]) + 1);
  std::vector<float> scores(vocabulary);
  for (std::size_t v = 0; v < vocabulary; ++v)
    scores[v] = static_cast<float>(mixed(state + 977 * (v + 1)) % 4096) / 512.0f;
  return scores;
}

Id likeliest(const std::vector<float>& scores) {
  return std::max_element(scores.begin(), scores.end()) - scores.begin();
}

float confidence_of(const std::vector<float>& scores) {
  const float best = *std::max_element(scores.begin(), scores.end());
  float sum = 0;
  for (const float score : scores) sum += std::exp(score - best);
  return 1 / sum;
}

namespace {

ILogger* logger = nullptr;

bool refuse(const std::string& said) {
  logger->log(ILogger::Severity::kWARNING, "a warning that nobody asked for");
  logger->log(ILogger::Severity::kERROR, (said + "\nand a second line").c_str());
  return false;
}

struct Tensor {
  std::vector<std::int64_t> shape;
  DataType type;
  bool is_input, on_host;

  std::size_t item() const {
    return type == DataType::kINT64 ? 8 : type == DataType::kFLOAT ? 4 : 2;
  }
  std::size_t size(std::size_t dimension) const {
    return static_cast<std::size_t>(shape.at(dimension));
  }
};

// What a test wrote about a plan.
struct Plan {
  explicit Plan(const native::Json& json)
      : profiles(checks::get<std::vector<std::vector<std::int64_t>>>(json, "profiles")),
        scratch(checks::get<std::int64_t>(json, "scratch")),
        updates_in_place(checks::get<bool>(json, "updates_in_place")) {
    for (const auto& [name, tensor] : json.at("tensors").fields())
      tensors[name] = {checks::get<std::vector<std::int64_t>>(tensor, "shape"),
                       static_cast<DataType>(checks::get<int>(tensor, "type")),
                       checks::get<bool>(tensor, "is_input"), checks::get<bool>(tensor, "on_host")};
    for (const auto& [name, other] : json.at("aliases").fields()) aliases[name] = other.text();
  }

  // Of the whole engine, which is more than any profile needs.
  std::size_t needs() const {
    return static_cast<std::size_t>(scratch) * (profiles.size() + 1) / 2;
  }

  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> aliases;
  // Width and rows, and what is read of the KV buffers where that varies: least, best, most.
  std::vector<std::vector<std::int64_t>> profiles;
  std::int64_t scratch;
  bool updates_in_place;
};

// One pass, as it was when it was enqueued.
struct Pass {
  const Plan& plan;
  const std::map<std::string, void*>& places;
  std::size_t width, rows, kv_length;

  // A tensor of so many elements; none where the plan has no such tensor.
  template <class T>
  T* at(const std::string& name, std::size_t count) const {
    const auto found = plan.tensors.find(name);
    if (found == plan.tensors.end()) return nullptr;
    return static_cast<T*>(on_device(places.at(name), count * found->second.item()));
  }

  std::vector<Id> update(const std::string& name, const Tensor& tensor, std::uint32_t number) const;
  void run() const;
};

// Write what is fed into a buffer, and read which tokens it holds. Each of its elements is a mark
// of the token and of the buffer, so that none is taken for another.
std::vector<Id> Pass::update(const std::string& name, const Tensor& tensor,
                             std::uint32_t number) const {
  const std::size_t heads = tensor.size(1), length = tensor.size(2), dims = tensor.size(3);
  const char* const from = at<char>(name.substr(8), heads * length * dims);
  char* const to = at<char>(name, heads * length * dims);
  if (plan.updates_in_place != (from == to)) broken(name + " is not where its form wants it");
  if (from != to) std::memcpy(to, from, heads * length * dims * tensor.item());
  const Id* const fed = at<Id>("input_ids", width);
  const auto start = static_cast<std::size_t>(*at<Id>("start", 1));
  if (start > length || width > length - start) broken("positions beyond the KV buffers");
  std::vector<Id> held(start + width, -1);
  for (std::size_t i = 0; i < heads * length * dims; ++i) {
    const std::size_t position = i / dims % length;
    if (position >= held.size()) continue;
    std::uint32_t mark = 0;  // little endian: the low half comes first
    if (position < start) std::memcpy(&mark, to + i * tensor.item(), tensor.item());
    if (position >= start)
      mark = static_cast<std::uint32_t>(fed[position - start] + 1) * 64 + number;
    std::memcpy(to + i * tensor.item(), &mark, tensor.item());
    if (mark % 64 != number || mark < 64) broken("a position that was never written");
    Id& token = held[position];
    if (token >= 0 && token != static_cast<Id>(mark / 64) - 1)
      broken("a buffer disagrees with itself");
    token = static_cast<Id>(mark / 64) - 1;
  }
  return held;
}

void Pass::run() const {
  std::vector<Id> seen;
  std::uint32_t number = 0;
  for (const auto& [name, tensor] : plan.tensors) {
    if (name.rfind("present_", 0) != 0) continue;
    const std::vector<Id> held = update(name, tensor, ++number);
    if (number > 1 && held != seen) broken("the layers disagree");
    seen = held;
  }
  if (kv_length != 0 && kv_length < seen.size()) broken("a position of its own is not read");
  for (const auto& sizes : plan.profiles) {
    const std::size_t other = sizes.size() > 6 ? static_cast<std::size_t>(sizes.back()) : 0;
    if (other >= seen.size() && other < kv_length) broken("more is read than is needed");
  }
  const Id* const wanted = at<Id>("rows", rows);
  const std::size_t vocabulary = plan.tensors.at("logits").size(2);
  float* const logits = at<float>("logits", rows * vocabulary);
  Id* const argmax = at<Id>("argmax", rows);
  float* const confidence = at<float>("confidence", rows);
  for (std::size_t r = 0; r < rows; ++r) {
    if (wanted[r] < 0 || wanted[r] >= static_cast<Id>(width)) broken("a row that was not fed");
    const std::size_t count = seen.size() - width + static_cast<std::size_t>(wanted[r]) + 1;
    const std::vector<float> scores = scores_after(seen.data(), count, vocabulary);
    std::copy(scores.begin(), scores.end(), logits + r * vocabulary);
    argmax[r] = likeliest(scores);
    if (confidence != nullptr) confidence[r] = confidence_of(scores);
  }
  // What nobody should read is filled, so that who shares memory with it is found.
  for (const char* const name : {"candidates.values", "candidates.ids"}) {
    const auto found = plan.tensors.find(name);
    if (found == plan.tensors.end()) continue;
    const std::size_t count = rows * found->second.size(2);
    std::memset(at<char>(name, count), 0xA5, count * found->second.item());
  }
}

class Context final : public IExecutionContext {
 public:
  explicit Context(std::shared_ptr<const Plan> plan) : plan_(std::move(plan)) {}

  bool setOptimizationProfileAsync(int32_t profileIndex, cudaStream_t stream) noexcept override {
    if (fails("setOptimizationProfileAsync")) return refuse(machine.said);
    if (stream == nullptr) broken("a profile without a stream");
    if (profileIndex < 0 || profileIndex >= static_cast<int>(plan_->profiles.size()))
      return refuse("no such profile");
    profile_ = profileIndex;
    return true;
  }

  bool setInputShape(char const* tensorName, Dims const& dims) noexcept override {
    if (profile_ < 0) broken("a shape before the profile");
    const std::string name = tensorName;
    const bool is_width = name == "input_ids", is_length = name == "kv_length";
    if (!is_width && !is_length && name != "rows") return refuse(name + " has one shape");
    if (dims.nbDims != (is_width ? 2 : 1))
      return refuse(name + " has another number of dimensions");
    const auto& sizes = plan_->profiles[static_cast<std::size_t>(profile_)];
    const std::int64_t size = dims.d[dims.nbDims - 1];
    const std::size_t first = is_width ? 0 : is_length ? 6 : 3;
    if (first + 2 >= sizes.size()) return refuse(name + " is not an input");
    if (size < sizes[first] || size > sizes[first + 2])
      return refuse(name + " is out of the profile's range");
    (is_width ? width_ : is_length ? kv_length_ : rows_) = static_cast<std::size_t>(size);
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
    if ((kv_length_ != 0) != (plan_->tensors.count("kv_length") != 0)) broken("no KV length");
    if (scratch_bytes_ < plan_->needs()) broken("too little working memory");
    last_profile() = profile_;
    enqueue(stream, [plan = plan_, at = at_, width = width_, rows = rows_, kv_length = kv_length_,
                     scratch = scratch_, bytes = scratch_bytes_] {
      if (bytes != 0) std::memset(on_device(scratch, bytes), 0xA5, bytes);
      Pass{*plan, at, width, rows, kv_length}.run();
    });
    return true;
  }

 private:
  std::shared_ptr<const Plan> plan_;
  int profile_ = -1;
  std::size_t width_ = 0, rows_ = 0, kv_length_ = 0, scratch_bytes_ = 0;
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

  int32_t getNbIOTensors() const noexcept override {
    return static_cast<int>(plan_->tensors.size());
  }
  char const* getIOTensorName(int32_t index) const noexcept override {
    return std::next(plan_->tensors.begin(), index)->first.c_str();
  }
  Dims getTensorShape(char const* tensorName) const noexcept override {
    return dims_of(tensor(tensorName).shape);
  }
  DataType getTensorDataType(char const* tensorName) const noexcept override {
    return tensor(tensorName).type;
  }
  TensorLocation getTensorLocation(char const* tensorName) const noexcept override {
    return tensor(tensorName).on_host ? TensorLocation::kHOST : TensorLocation::kDEVICE;
  }
  TensorIOMode getTensorIOMode(char const* tensorName) const noexcept override {
    return tensor(tensorName).is_input ? TensorIOMode::kINPUT : TensorIOMode::kOUTPUT;
  }
  Dims getProfileShape(char const* tensorName, int32_t profileIndex,
                       OptProfileSelector select) const noexcept override {
    std::vector<std::int64_t> shape = tensor(tensorName).shape;
    const std::string name = tensorName;
    const std::size_t first = name == "rows" ? 3 : name == "kv_length" ? 6 : 0;
    const auto& sizes = plan_->profiles.at(static_cast<std::size_t>(profileIndex));
    if (shape.back() < 0) shape.back() = sizes.at(static_cast<std::size_t>(select) + first);
    return dims_of(shape);
  }
  int32_t getNbOptimizationProfiles() const noexcept override {
    return static_cast<int>(plan_->profiles.size());
  }
  int64_t getDeviceMemorySizeV2() const noexcept override {
    return static_cast<std::int64_t>(plan_->needs());
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
    return new Engine(std::make_shared<const Plan>(native::Json::parse(text)));
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
