#include "native/ort_session.hpp"

#include "failure.hpp"

namespace specrt::native {

namespace {

constexpr int kLogErrors = 3;

std::string shape_of(const OrtEntries& call, const OrtTypeInfo* info, OrtPort& port) {
  const OrtTensorTypeAndShapeInfo* tensor = nullptr;
  std::string reason = ort_reason(call, call.CastTypeInfoToTensorInfo(info, &tensor));
  if (!reason.empty() || tensor == nullptr) return reason;  // no tensor: left without a type
  std::size_t count = 0;
  reason = ort_reason(call, call.GetTensorElementType(tensor, &port.type));
  if (reason.empty()) reason = ort_reason(call, call.GetDimensionsCount(tensor, &count));
  port.shape.resize(count);
  if (reason.empty())
    reason = ort_reason(call, call.GetDimensions(tensor, port.shape.data(), count));
  return reason;
}

}  // namespace

std::size_t ort_item_bytes(ONNXTensorElementDataType type) {
  if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) return 4;
  if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64) return 8;
  return type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 ? 2 : 0;
}

SharedSession::SharedSession(const OrtLibrary& library, const std::string& path, int threads,
                             bool widens)
    : library_(library) {
  // Threads of its own are refused where the application made a pool for all, and the pool where
  // it made none; which of them it did the library does not tell.
  const bool pooled = library.has_pool();
  std::string reason = open(path, threads, widens, pooled);
  if (!reason.empty() && !open(path, threads, widens, !pooled).empty())
    throw Failure(SPECRT_ENGINE, "ONNX Runtime " + library.version() + " cannot open " + path +
                                     ": " + reason +
                                     "; build the bundle again with the version installed here");
  describe();
}

SharedSession::~SharedSession() { library_.call().ReleaseSession(session_); }

std::string SharedSession::open(const std::string& path, int threads, bool widens, bool pooled) {
  const OrtEntries& call = library_.call();
  OrtSessionOptions* options = nullptr;
  std::string reason = ort_reason(call, call.CreateSessionOptions(&options));
  if (!reason.empty()) return reason;
  const auto set = [&](OrtStatus* status) { reason += ort_reason(call, status); };
  // The graph was optimised when it was compiled.
  const auto level = widens ? ORT_ENABLE_BASIC : ORT_DISABLE_ALL;
  set(call.SetSessionGraphOptimizationLevel(options, level));
  set(call.SetSessionLogSeverityLevel(options, kLogErrors));
  if (pooled) {
    set(call.DisablePerSessionThreads(options));
  } else {
    set(call.SetIntraOpNumThreads(options, threads));
    set(call.SetInterOpNumThreads(options, 1));
  }
  if (reason.empty())
    set(call.CreateSession(library_.environment(0), path.c_str(), options, &session_));
  call.ReleaseSessionOptions(options);
  return reason;
}

void SharedSession::describe() {
  const OrtEntries& call = library_.call();
  std::string reason;
  const auto set = [&](OrtStatus* status) { reason += ort_reason(call, status); };
  OrtAllocator* allocator = nullptr;
  std::size_t inputs = 0, outputs = 0;
  set(call.GetAllocatorWithDefaultOptions(&allocator));
  set(call.SessionGetInputCount(session_, &inputs));
  set(call.SessionGetOutputCount(session_, &outputs));
  const auto name = [&](bool input, std::size_t i) {
    char* text = nullptr;
    set(input ? call.SessionGetInputName(session_, i, allocator, &text)
              : call.SessionGetOutputName(session_, i, allocator, &text));
    const std::string found = text == nullptr ? "" : text;
    if (text != nullptr) set(call.AllocatorFree(allocator, text));
    return found;
  };
  for (std::size_t i = 0; i < inputs && reason.empty(); ++i) {
    OrtTypeInfo* info = nullptr;
    set(call.SessionGetInputTypeInfo(session_, i, &info));
    if (info == nullptr) break;
    reason += shape_of(call, info, inputs_[name(true, i)]);
    call.ReleaseTypeInfo(info);
  }
  for (std::size_t i = 0; i < outputs && reason.empty(); ++i) outputs_.insert(name(false, i));
  if (reason.empty()) return;
  call.ReleaseSession(session_);
  throw Failure(SPECRT_ENGINE,
                "ONNX Runtime does not describe an engine: " + reason + "; build the bundle again");
}

Binding::Binding(const SharedSession& session) : session_(session) {
  const OrtEntries& call = session.library().call();
  check(call.CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, &memory_), "memory");
  if (OrtStatus* status = call.CreateIoBinding(session.get(), &binding_)) {
    call.ReleaseMemoryInfo(memory_);
    check(status, "a binding");
  }
}

Binding::~Binding() {
  const OrtEntries& call = session_.library().call();
  call.ReleaseIoBinding(binding_);
  for (OrtValue* value : values_) call.ReleaseValue(value);
  call.ReleaseMemoryInfo(memory_);
}

void Binding::check(OrtStatus* status, const std::string& what) const {
  const std::string reason = ort_reason(session_.library().call(), status);
  if (!reason.empty())
    throw Failure(SPECRT_ENGINE, "ONNX Runtime does not take " + what + " of a pass: " + reason +
                                     "; build the bundle again");
}

OrtValue* Binding::value(const std::string& name, const Place& place) {
  std::size_t bytes = ort_item_bytes(place.type);
  for (const std::int64_t size : place.shape) bytes *= static_cast<std::size_t>(size);
  OrtValue* made = nullptr;
  check(
      session_.library().call().CreateTensorWithDataAsOrtValue(
          memory_, place.memory, bytes, place.shape.data(), place.shape.size(), place.type, &made),
      name);
  values_.push_back(made);
  return made;
}

void Binding::input(const std::string& name, const Place& place) {
  check(session_.library().call().BindInput(binding_, name.c_str(), value(name, place)), name);
}

void Binding::output(const std::string& name, const Place& place) {
  check(session_.library().call().BindOutput(binding_, name.c_str(), value(name, place)), name);
}

void Binding::run(std::size_t width) {
  const OrtEntries& call = session_.library().call();
  const std::string reason =
      ort_reason(call, call.RunWithBinding(session_.get(), nullptr, binding_));
  if (!reason.empty())
    throw Failure(SPECRT_ENGINE, "ONNX Runtime failed in a pass of width " + std::to_string(width) +
                                     ": " + reason);
}

}  // namespace specrt::native
