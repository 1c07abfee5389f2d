// ONNX Runtime's C interface, as far as specrt uses it: its types, and its table of functions.
//
// The types are those of its own header where that is at hand. It is distributed without it in
// places, and they, the numbers of its enumerations and the positions in its table are the same in
// every version.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef SPECRT_ONNXRUNTIME_HEADER
#include <onnxruntime_c_api.h>
#else

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
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtCustomOpDomain;
struct OrtApi;

enum OrtErrorCode { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 };
enum OrtLoggingLevel { ORT_LOGGING_LEVEL_WARNING = 2, ORT_LOGGING_LEVEL_ERROR = 3 };
enum GraphOptimizationLevel { ORT_DISABLE_ALL = 0, ORT_ENABLE_BASIC = 1, ORT_ENABLE_ALL = 99 };
enum OrtAllocatorType { OrtDeviceAllocator = 0 };
enum OrtMemType { OrtMemTypeDefault = 0 };
enum OrtCustomOpInputOutputCharacteristic { INPUT_OUTPUT_REQUIRED = 0, INPUT_OUTPUT_OPTIONAL = 1 };
enum ONNXTensorElementDataType {
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED = 0,  // as the type of an input: any
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 = 2,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 = 7,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 = 10,
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

// Version 16 of the structure: with the entries of version 2, which return a status.
struct OrtCustomOp {
  std::uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  ONNXTensorElementDataType (*GetInputType)(const OrtCustomOp*, std::size_t index);
  std::size_t (*GetInputTypeCount)(const OrtCustomOp*);
  ONNXTensorElementDataType (*GetOutputType)(const OrtCustomOp*, std::size_t index);
  std::size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void* kernel, OrtKernelContext*);
  void (*KernelDestroy)(void* kernel);
  OrtCustomOpInputOutputCharacteristic (*GetInputCharacteristic)(const OrtCustomOp*, std::size_t);
  OrtCustomOpInputOutputCharacteristic (*GetOutputCharacteristic)(const OrtCustomOp*, std::size_t);
  OrtMemType (*GetInputMemoryType)(const OrtCustomOp*, std::size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*);
};
}

#endif

namespace specrt {

// The version of the interface that is requested: the first with work divided by its thread pool.
constexpr std::uint32_t kOrtApi = 17;

// ENTRY(position in the table, name, result, parameters)
#define SPECRT_ORT_ENTRIES(ENTRY)                                                                  \
  ENTRY(0, CreateStatus, OrtStatus*, (OrtErrorCode, const char*))                                  \
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
  ENTRY(26, CreateCustomOpDomain, OrtStatus*, (const char*, OrtCustomOpDomain**))                  \
  ENTRY(27, CustomOpDomain_Add, OrtStatus*, (OrtCustomOpDomain*, const OrtCustomOp*))              \
  ENTRY(28, AddCustomOpDomain, OrtStatus*, (OrtSessionOptions*, OrtCustomOpDomain*))               \
  ENTRY(30, SessionGetInputCount, OrtStatus*, (const OrtSession*, std::size_t*))                   \
  ENTRY(31, SessionGetOutputCount, OrtStatus*, (const OrtSession*, std::size_t*))                  \
  ENTRY(33, SessionGetInputTypeInfo, OrtStatus*, (const OrtSession*, std::size_t, OrtTypeInfo**))  \
  ENTRY(34, SessionGetOutputTypeInfo, OrtStatus*, (const OrtSession*, std::size_t, OrtTypeInfo**)) \
  ENTRY(36, SessionGetInputName, OrtStatus*,                                                       \
        (const OrtSession*, std::size_t, OrtAllocator*, char**))                                   \
  ENTRY(37, SessionGetOutputName, OrtStatus*,                                                      \
        (const OrtSession*, std::size_t, OrtAllocator*, char**))                                   \
  ENTRY(49, CreateTensorWithDataAsOrtValue, OrtStatus*,                                            \
        (const OrtMemoryInfo*, void*, std::size_t, const std::int64_t*, std::size_t,               \
         ONNXTensorElementDataType, OrtValue**))                                                   \
  ENTRY(51, GetTensorMutableData, OrtStatus*, (OrtValue*, void**))                                 \
  ENTRY(55, CastTypeInfoToTensorInfo, OrtStatus*,                                                  \
        (const OrtTypeInfo*, const OrtTensorTypeAndShapeInfo**))                                   \
  ENTRY(60, GetTensorElementType, OrtStatus*,                                                      \
        (const OrtTensorTypeAndShapeInfo*, ONNXTensorElementDataType*))                            \
  ENTRY(61, GetDimensionsCount, OrtStatus*, (const OrtTensorTypeAndShapeInfo*, std::size_t*))      \
  ENTRY(62, GetDimensions, OrtStatus*,                                                             \
        (const OrtTensorTypeAndShapeInfo*, std::int64_t*, std::size_t))                            \
  ENTRY(65, GetTensorTypeAndShape, OrtStatus*, (const OrtValue*, OrtTensorTypeAndShapeInfo**))     \
  ENTRY(69, CreateCpuMemoryInfo, OrtStatus*, (OrtAllocatorType, OrtMemType, OrtMemoryInfo**))      \
  ENTRY(76, AllocatorFree, OrtStatus*, (OrtAllocator*, void*))                                     \
  ENTRY(78, GetAllocatorWithDefaultOptions, OrtStatus*, (OrtAllocator**))                          \
  ENTRY(85, KernelInfoGetAttribute_float, OrtStatus*, (const OrtKernelInfo*, const char*, float*)) \
  ENTRY(86, KernelInfoGetAttribute_int64, OrtStatus*,                                              \
        (const OrtKernelInfo*, const char*, std::int64_t*))                                        \
  ENTRY(87, KernelInfoGetAttribute_string, OrtStatus*,                                             \
        (const OrtKernelInfo*, const char*, char*, std::size_t*))                                  \
  ENTRY(88, KernelContext_GetInputCount, OrtStatus*, (const OrtKernelContext*, std::size_t*))      \
  ENTRY(90, KernelContext_GetInput, OrtStatus*,                                                    \
        (const OrtKernelContext*, std::size_t, const OrtValue**))                                  \
  ENTRY(91, KernelContext_GetOutput, OrtStatus*,                                                   \
        (OrtKernelContext*, std::size_t, const std::int64_t*, std::size_t, OrtValue**))            \
  ENTRY(93, ReleaseStatus, void, (OrtStatus*))                                                     \
  ENTRY(94, ReleaseMemoryInfo, void, (OrtMemoryInfo*))                                             \
  ENTRY(95, ReleaseSession, void, (OrtSession*))                                                   \
  ENTRY(96, ReleaseValue, void, (OrtValue*))                                                       \
  ENTRY(98, ReleaseTypeInfo, void, (OrtTypeInfo*))                                                 \
  ENTRY(99, ReleaseTensorTypeAndShapeInfo, void, (OrtTensorTypeAndShapeInfo*))                     \
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
  ENTRY(148, SetGlobalInterOpNumThreads, OrtStatus*, (OrtThreadingOptions*, int))                  \
  ENTRY(274, KernelContext_ParallelFor, OrtStatus*,                                                \
        (const OrtKernelContext*, void (*)(void*, std::size_t), std::size_t, std::size_t, void*))

// The function at a position of the table: all versions have the first ones in common.
inline void* entry(const OrtApi* api, std::size_t position) {
  return reinterpret_cast<void* const*>(api)[position];
}

struct OrtEntries {
#define SPECRT_ORT_MEMBER(position, name, result, parameters) result(*name) parameters = nullptr;
  SPECRT_ORT_ENTRIES(SPECRT_ORT_MEMBER)
#undef SPECRT_ORT_MEMBER

  OrtEntries() = default;
  explicit OrtEntries(const OrtApi* api) {
#ifdef SPECRT_ONNXRUNTIME_HEADER
#define SPECRT_ORT_TAKE(position, name, result, parameters) name = api->name;
#else
#define SPECRT_ORT_TAKE(position, name, result, parameters) \
  name = reinterpret_cast<decltype(name)>(entry(api, position));
#endif
    SPECRT_ORT_ENTRIES(SPECRT_ORT_TAKE)
#undef SPECRT_ORT_TAKE
  }
};

namespace kernels {

// Let sessions of some options run the operators of domain `specrt`. Any thread; one library.
OrtStatus* register_operators(OrtSessionOptions* options, const OrtApiBase* base);

}  // namespace kernels

}  // namespace specrt
