// ONNX Runtime, loaded at run time: its types, its functions, a session, and the bindings of a
// pass.
//
// The types are those of its own header where that is at hand. It is distributed without it in
// places, and they, the numbers of its enumerations and the positions in its table of functions are
// the same in every version.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#ifdef SPECRT_ONNXRUNTIME_HEADER
#include <onnxruntime_c_api.h>
#else

#include <cstddef>
#include <cstdint>

extern "C" {
struct OrtEnv;
struct OrtStatus;
struct OrtMemoryInfo;
struct OrtSession;
struct OrtSessionOptions;
struct OrtRunOptions;
struct OrtValue;
struct OrtTypeInfo;
struct OrtTensorTypeAndShapeInfo;
struct OrtIoBinding;
struct OrtThreadingOptions;
struct OrtApi;

enum OrtLoggingLevel { ORT_LOGGING_LEVEL_WARNING = 2, ORT_LOGGING_LEVEL_ERROR = 3 };
enum GraphOptimizationLevel { ORT_DISABLE_ALL = 0, ORT_ENABLE_BASIC = 1, ORT_ENABLE_ALL = 99 };
enum OrtAllocatorType { OrtDeviceAllocator = 0 };
enum OrtMemType { OrtMemTypeDefault = 0 };
enum ONNXTensorElementDataType {
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED = 0,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 = 7,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 = 10,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16 = 16,
};

struct OrtAllocator {
  std::uint32_t version;
  void* (*Alloc)(OrtAllocator* self, std::size_t bytes);
  void (*Free)(OrtAllocator* self, void* memory);
  const OrtMemoryInfo* (*Info)(const OrtAllocator* self);
};

struct OrtApiBase {
  const OrtApi* (*GetApi)(std::uint32_t version);
  const char* (*GetVersionString)();
};
}

#endif

namespace specrt::native {

// The version of the C interface that is requested: the first with everything that is used.
constexpr std::uint32_t kOrtApi = 5;

// ENTRY(position in the table, name, result, parameters)
#define SPECRT_ORT_ENTRIES(ENTRY)                                                                  \
  ENTRY(2, GetErrorMessage, const char*, (const OrtStatus*))                                       \
  ENTRY(3, CreateEnv, OrtStatus*, (OrtLoggingLevel, const char*, OrtEnv**))                        \
  ENTRY(7, CreateSession, OrtStatus*,                                                              \
        (const OrtEnv*, const char*, const OrtSessionOptions*, OrtSession**))                      \
  ENTRY(10, CreateSessionOptions, OrtStatus*, (OrtSessionOptions**))                               \
  ENTRY(22, SetSessionLogSeverityLevel, OrtStatus*, (OrtSessionOptions*, int))                     \
  ENTRY(23, SetSessionGraphOptimizationLevel, OrtStatus*,                                          \
        (OrtSessionOptions*, GraphOptimizationLevel))                                              \
  ENTRY(24, SetIntraOpNumThreads, OrtStatus*, (OrtSessionOptions*, int))                           \
  ENTRY(25, SetInterOpNumThreads, OrtStatus*, (OrtSessionOptions*, int))                           \
  ENTRY(30, SessionGetInputCount, OrtStatus*, (const OrtSession*, std::size_t*))                   \
  ENTRY(31, SessionGetOutputCount, OrtStatus*, (const OrtSession*, std::size_t*))                  \
  ENTRY(33, SessionGetInputTypeInfo, OrtStatus*, (const OrtSession*, std::size_t, OrtTypeInfo**))  \
  ENTRY(36, SessionGetInputName, OrtStatus*,                                                       \
        (const OrtSession*, std::size_t, OrtAllocator*, char**))                                   \
  ENTRY(37, SessionGetOutputName, OrtStatus*,                                                      \
        (const OrtSession*, std::size_t, OrtAllocator*, char**))                                   \
  ENTRY(49, CreateTensorWithDataAsOrtValue, OrtStatus*,                                            \
        (const OrtMemoryInfo*, void*, std::size_t, const std::int64_t*, std::size_t,               \
         ONNXTensorElementDataType, OrtValue**))                                                   \
  ENTRY(55, CastTypeInfoToTensorInfo, OrtStatus*,                                                  \
        (const OrtTypeInfo*, const OrtTensorTypeAndShapeInfo**))                                   \
  ENTRY(60, GetTensorElementType, OrtStatus*,                                                      \
        (const OrtTensorTypeAndShapeInfo*, ONNXTensorElementDataType*))                            \
  ENTRY(61, GetDimensionsCount, OrtStatus*, (const OrtTensorTypeAndShapeInfo*, std::size_t*))      \
  ENTRY(62, GetDimensions, OrtStatus*,                                                             \
        (const OrtTensorTypeAndShapeInfo*, std::int64_t*, std::size_t))                            \
  ENTRY(69, CreateCpuMemoryInfo, OrtStatus*, (OrtAllocatorType, OrtMemType, OrtMemoryInfo**))      \
  ENTRY(76, AllocatorFree, OrtStatus*, (OrtAllocator*, void*))                                     \
  ENTRY(78, GetAllocatorWithDefaultOptions, OrtStatus*, (OrtAllocator**))                          \
  ENTRY(93, ReleaseStatus, void, (OrtStatus*))                                                     \
  ENTRY(94, ReleaseMemoryInfo, void, (OrtMemoryInfo*))                                             \
  ENTRY(95, ReleaseSession, void, (OrtSession*))                                                   \
  ENTRY(96, ReleaseValue, void, (OrtValue*))                                                       \
  ENTRY(98, ReleaseTypeInfo, void, (OrtTypeInfo*))                                                 \
  ENTRY(100, ReleaseSessionOptions, void, (OrtSessionOptions*))                                    \
  ENTRY(119, CreateEnvWithGlobalThreadPools, OrtStatus*,                                           \
        (OrtLoggingLevel, const char*, const OrtThreadingOptions*, OrtEnv**))                      \
  ENTRY(120, DisablePerSessionThreads, OrtStatus*, (OrtSessionOptions*))                           \
  ENTRY(121, CreateThreadingOptions, OrtStatus*, (OrtThreadingOptions**))                          \
  ENTRY(122, ReleaseThreadingOptions, void, (OrtThreadingOptions*))                                \
  ENTRY(133, RunWithBinding, OrtStatus*, (OrtSession*, const OrtRunOptions*, const OrtIoBinding*)) \
  ENTRY(134, CreateIoBinding, OrtStatus*, (OrtSession*, OrtIoBinding**))                           \
  ENTRY(135, ReleaseIoBinding, void, (OrtIoBinding*))                                              \
  ENTRY(136, BindInput, OrtStatus*, (OrtIoBinding*, const char*, const OrtValue*))                 \
  ENTRY(137, BindOutput, OrtStatus*, (OrtIoBinding*, const char*, const OrtValue*))                \
  ENTRY(147, SetGlobalIntraOpNumThreads, OrtStatus*, (OrtThreadingOptions*, int))                  \
  ENTRY(148, SetGlobalInterOpNumThreads, OrtStatus*, (OrtThreadingOptions*, int))

struct OrtEntries {
#define SPECRT_ORT_MEMBER(position, name, result, parameters) result(*name) parameters = nullptr;
  SPECRT_ORT_ENTRIES(SPECRT_ORT_MEMBER)
#undef SPECRT_ORT_MEMBER
};

class OrtLibrary {
 public:
  // The library of this process. The first caller loads it: from `path`, else from where this
  // library was configured, else where the system finds it. Throws Failure(SPECRT_ENGINE) where it
  // cannot be loaded or is too old, and where another one was loaded before.
  static const OrtLibrary& load(const std::string& path);
  // The one that was loaded; nullptr before.
  static const OrtLibrary* loaded();

  const OrtEntries& call() const { return call_; }
  const std::string& version() const { return version_; }

  // The environment of every session, made on first use. With `pool` its sessions share
  // so many threads, where they can.
  const OrtEnv* environment(int pool) const;
  bool has_pool() const;

 private:
  explicit OrtLibrary(const std::string& path);

  OrtEntries call_;
  std::string path_;
  std::string version_;
};

// Empty where a call went well, else the first line of the library's message.
std::string ort_reason(const OrtEntries& call, OrtStatus* status);

struct OrtPort {
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  std::vector<std::int64_t> shape;
};

// Weights and graph, loaded once. Any thread; bindings run at once.
class SharedSession {
 public:
  // `threads` of its own, or those of the pool where the process has one; `upcast_weights` turns
  // weights stored in half precision into fp32, once. Throws Failure(SPECRT_ENGINE) when refused.
  SharedSession(const OrtLibrary& library, const std::string& path, int threads,
                bool upcast_weights);
  ~SharedSession();
  SharedSession(const SharedSession&) = delete;
  SharedSession& operator=(const SharedSession&) = delete;

  const std::map<std::string, OrtPort>& inputs() const { return inputs_; }
  bool has_output(const std::string& name) const { return outputs_.count(name) > 0; }
  const OrtLibrary& library() const { return library_; }
  OrtSession* get() const { return session_; }

 private:
  std::string open(const std::string& path, int threads, bool upcast_weights, bool pooled);
  void describe();

  const OrtLibrary& library_;
  OrtSession* session_ = nullptr;
  std::map<std::string, OrtPort> inputs_;
  std::set<std::string> outputs_;
};

// Memory bound to the inputs and outputs of a session; it outlives the binding.
class Binding {
 public:
  explicit Binding(const SharedSession& session);
  ~Binding();
  Binding(const Binding&) = delete;
  Binding& operator=(const Binding&) = delete;

  struct Place {
    void* memory;
    ONNXTensorElementDataType type;
    std::vector<std::int64_t> shape;
  };
  void input(const std::string& name, const Place& place);
  void output(const std::string& name, const Place& place);
  // Run a pass. `width` is for the message of Failure(SPECRT_ENGINE).
  void run(std::size_t width);

 private:
  OrtValue* value(const std::string& name, const Place& place);
  void check(OrtStatus* status, const std::string& what) const;

  const SharedSession& session_;
  OrtMemoryInfo* memory_ = nullptr;
  OrtIoBinding* binding_ = nullptr;
  std::vector<OrtValue*> values_;
};

std::size_t ort_item_bytes(ONNXTensorElementDataType type);

}  // namespace specrt::native
