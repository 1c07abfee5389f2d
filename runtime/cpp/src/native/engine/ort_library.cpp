#include "native/engine/ort_library.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "failure.hpp"
#include "native/machine.hpp"

namespace specrt::native {

namespace {

#ifdef SPECRT_ONNXRUNTIME_HEADER
#define SPECRT_ORT_PLACE(position, name, result, parameters)                     \
  static_assert(offsetof(OrtApi, name) == std::size_t{position} * sizeof(void*), \
                "the header has " #name " at another position of the table");
SPECRT_ORT_ENTRIES(SPECRT_ORT_PLACE)
#undef SPECRT_ORT_PLACE
#endif

constexpr char kRemedy[] =
    "install ONNX Runtime, or name its libonnxruntime.so in the options of opening or as "
    "SPECRT_ONNXRUNTIME_LIBRARY when this library is built";

std::mutex& guard() {
  static std::mutex mutex;
  return mutex;
}

// What was loaded and made stays until the process ends: its threads may run until then.
OrtLibrary*& current() {
  static OrtLibrary* library = nullptr;
  return library;
}

struct Environment {
  OrtEnv* env = nullptr;
  bool has_pool = false;
};

Environment& environment_of_process() {
  static Environment environment;
  return environment;
}

std::vector<std::string> places(const std::string& path) {
  if (!path.empty()) return {path};
  std::vector<std::string> known;
#ifdef SPECRT_ONNXRUNTIME_LIBRARY
  known.push_back(SPECRT_ONNXRUNTIME_LIBRARY);
#endif
  known.insert(known.end(), {"libonnxruntime.so.1", "libonnxruntime.so"});
  return known;
}

// Whether an entry of the table points into a library.
bool is_code(void* entry) {
  Dl_info place;
  return entry != nullptr && dladdr(entry, &place) != 0;
}

[[noreturn]] void refuse(const std::string& what) { throw Failure(SPECRT_ENGINE, what); }

const OrtApiBase& open_base(const std::string& path, std::string& result) {
  setenv("ORT_DISABLE_TELEMETRY", "1", 0);  // read when it starts; what the application says stays
  std::string reason;
  for (const std::string& place : places(path)) {
    void* library = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      if (reason.empty()) reason = dlerror();
      continue;
    }
    using GetBase = const OrtApiBase* (*)();
    const auto base = reinterpret_cast<GetBase>(dlsym(library, "OrtGetApiBase"));
    const OrtApiBase* const its = base == nullptr ? nullptr : base();
    if (its != nullptr && its->GetApi != nullptr && its->GetVersionString != nullptr) {
      result = place;
      return *its;
    }
    dlclose(library);
    if (reason.empty()) reason = place + " has no OrtGetApiBase of ONNX Runtime";
  }
  throw failure_of(SPECRT_ENGINE, "ONNX Runtime cannot be loaded", reason, kRemedy);
}

}  // namespace

std::string ort_reason(const OrtEntries& call, OrtStatus* status) {
  if (status == nullptr) return "";
  std::string message = call.GetErrorMessage(status);
  call.ReleaseStatus(status);
  message.resize(std::min(message.find('\n'), message.size()));
  return message.empty() ? "no reason given" : message;
}

OrtLibrary::OrtLibrary(const std::string& path) {
  base_ = &open_base(path, path_);
  const char* const version = base_->GetVersionString();
  version_ = version == nullptr ? "of unknown version" : version;
  const OrtApi* api = base_->GetApi(kOrtApi);
  // Positions are what version 1 of the library promises to keep.
  if (api == nullptr || version_.compare(0, 2, "1.") != 0)
    refuse(path_ + " is ONNX Runtime " + version_ + "; expected 1.17 or a newer 1.x");
  call_ = OrtEntries(api);
#define SPECRT_ORT_CHECK(position, name, result, parameters) \
  if (!is_code(reinterpret_cast<void*>(call_.name)))         \
    refuse(path_ + " says it is ONNX Runtime " + version_ + ", and has no " #name "; " + kRemedy);
  SPECRT_ORT_ENTRIES(SPECRT_ORT_CHECK)
#undef SPECRT_ORT_CHECK
}

const OrtLibrary& OrtLibrary::load(const std::string& path) {
  const std::lock_guard<std::mutex> lock(guard());
  if (current() == nullptr) current() = new OrtLibrary(path);
  if (!path.empty() && path != current()->path_)
    refuse("ONNX Runtime was loaded from " + current()->path_ + " before, not from " + path +
           "; one process uses one: name the same for every bundle");
  return *current();
}

const OrtLibrary* OrtLibrary::loaded() {
  const std::lock_guard<std::mutex> lock(guard());
  return current();
}

const OrtEnv* OrtLibrary::environment(int pool) const {
  const std::lock_guard<std::mutex> lock(guard());
  Environment& environment = environment_of_process();
  if (environment.env != nullptr) return environment.env;
  OrtThreadingOptions* options = nullptr;
  std::string reason;
  if (pool > 0) {
    reason = ort_reason(call_, call_.CreateThreadingOptions(&options));
    for (OrtStatus* status :
         {reason.empty() ? call_.SetGlobalIntraOpNumThreads(options, pool) : nullptr,
          reason.empty() ? call_.SetGlobalInterOpNumThreads(options, 1) : nullptr})
      reason += ort_reason(call_, status);
    if (reason.empty())
      reason = ort_reason(call_, call_.CreateEnvWithGlobalThreadPools(
                                     ORT_LOGGING_LEVEL_ERROR, "specrt", options, &environment.env));
    if (options != nullptr) call_.ReleaseThreadingOptions(options);
    environment.has_pool = reason.empty();
  } else {
    reason =
        ort_reason(call_, call_.CreateEnv(ORT_LOGGING_LEVEL_ERROR, "specrt", &environment.env));
  }
  if (!reason.empty())
    throw failure_of(SPECRT_ENGINE, "ONNX Runtime " + version_ + " cannot start", reason, kRemedy);
  return environment.env;
}

bool OrtLibrary::has_pool() const {
  const std::lock_guard<std::mutex> lock(guard());
  return environment_of_process().has_pool;
}

namespace {

// Only what ends the process is logged: what fails is in a status.
constexpr int kLogFatal = 4;

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

SharedSession::SharedSession(const OrtLibrary& library, const std::string& path, int threads)
    : library_(library) {
  // Threads of its own are refused where the application made a pool for all, and the pool where
  // it made none; the library does not report which.
  const bool pooled = library.has_pool();
  std::string reason = open(path, threads, pooled);
  if (!reason.empty() && !open(path, threads, !pooled).empty())
    throw failure_of(SPECRT_ENGINE, "ONNX Runtime " + library.version() + " cannot open " + path,
                     reason, "build the bundle again with the version installed here");
  describe();
}

SharedSession::~SharedSession() { library_.call().ReleaseSession(session_); }

std::string SharedSession::open(const std::string& path, int threads, bool pooled) {
  const OrtEntries& call = library_.call();
  OrtSessionOptions* options = nullptr;
  std::string reason = ort_reason(call, call.CreateSessionOptions(&options));
  if (!reason.empty()) return reason;
  const auto set = [&](OrtStatus* status) { reason += ort_reason(call, status); };
  // The graph was optimised when it was compiled.
  set(call.SetSessionGraphOptimizationLevel(options, ORT_DISABLE_ALL));
  set(call.SetSessionLogSeverityLevel(options, kLogFatal));
  set(kernels::register_operators(options, &library_.base()));
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
    const std::string result = text == nullptr ? "" : text;
    if (text != nullptr) set(call.AllocatorFree(allocator, text));
    return result;
  };
  const auto read = [&](bool input, std::size_t count, std::map<std::string, OrtPort>& ports) {
    for (std::size_t i = 0; i < count && reason.empty(); ++i) {
      OrtTypeInfo* info = nullptr;
      set(input ? call.SessionGetInputTypeInfo(session_, i, &info)
                : call.SessionGetOutputTypeInfo(session_, i, &info));
      if (info == nullptr) return;
      reason += shape_of(call, info, ports[name(input, i)]);
      call.ReleaseTypeInfo(info);
    }
  };
  read(true, inputs, inputs_);
  read(false, outputs, outputs_);
  if (reason.empty()) return;
  call.ReleaseSession(session_);
  throw failure_of(SPECRT_ENGINE, "ONNX Runtime does not describe an engine", reason,
                   "build the bundle again");
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
    throw failure_of(SPECRT_ENGINE, "ONNX Runtime does not take " + what + " of a pass", reason,
                     "build the bundle again");
}

OrtValue* Binding::value(const std::string& name, const Place& place) {
  std::size_t bytes = place.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? 4 : 8;
  for (const std::int64_t size : place.shape) bytes *= static_cast<std::size_t>(size);
  OrtValue* value = nullptr;
  check(
      session_.library().call().CreateTensorWithDataAsOrtValue(
          memory_, place.memory, bytes, place.shape.data(), place.shape.size(), place.type, &value),
      name);
  values_.push_back(value);
  return value;
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
    throw failure_of(SPECRT_ENGINE,
                     "ONNX Runtime failed in a pass of width " + std::to_string(width), reason,
                     "begin the generation again");
}

}  // namespace specrt::native
