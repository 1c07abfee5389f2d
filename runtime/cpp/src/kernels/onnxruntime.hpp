// What custom operators use of ONNX Runtime's C interface.
//
// It is distributed without its header in places. Its types, the numbers of its enumerations and
// the positions in its table of functions are the same in every version.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
struct OrtStatus;
struct OrtValue;
struct OrtTensorTypeAndShapeInfo;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtApi;

enum OrtErrorCode { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 };
enum OrtMemType { OrtMemTypeDefault = 0 };
enum OrtCustomOpInputOutputCharacteristic { INPUT_OUTPUT_REQUIRED = 0, INPUT_OUTPUT_OPTIONAL = 1 };
enum ONNXTensorElementDataType {
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED = 0,  // as the type of an input: any
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 = 2,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 = 7,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 = 10,
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

namespace specrt::kernels {

// The version of the interface that is requested: the first with work divided by its thread pool.
constexpr std::uint32_t kOrtApi = 17;
constexpr std::uint32_t kOrtCustomOp = 16;

// ENTRY(position in the table, name, parameters); all return a status but those that release.
#define SPECRT_ORT_ENTRIES(ENTRY)                                                                  \
  ENTRY(0, CreateStatus, OrtStatus*, (OrtErrorCode, const char*))                                  \
  ENTRY(26, CreateCustomOpDomain, OrtStatus*, (const char*, OrtCustomOpDomain**))                  \
  ENTRY(27, CustomOpDomain_Add, OrtStatus*, (OrtCustomOpDomain*, const OrtCustomOp*))              \
  ENTRY(28, AddCustomOpDomain, OrtStatus*, (OrtSessionOptions*, OrtCustomOpDomain*))               \
  ENTRY(51, GetTensorMutableData, OrtStatus*, (OrtValue*, void**))                                 \
  ENTRY(60, GetTensorElementType, OrtStatus*,                                                      \
        (const OrtTensorTypeAndShapeInfo*, ONNXTensorElementDataType*))                            \
  ENTRY(61, GetDimensionsCount, OrtStatus*, (const OrtTensorTypeAndShapeInfo*, std::size_t*))      \
  ENTRY(62, GetDimensions, OrtStatus*,                                                             \
        (const OrtTensorTypeAndShapeInfo*, std::int64_t*, std::size_t))                            \
  ENTRY(65, GetTensorTypeAndShape, OrtStatus*, (const OrtValue*, OrtTensorTypeAndShapeInfo**))     \
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
  ENTRY(99, ReleaseTensorTypeAndShapeInfo, void, (OrtTensorTypeAndShapeInfo*))                     \
  ENTRY(274, KernelContext_ParallelFor, OrtStatus*,                                                \
        (const OrtKernelContext*, void (*)(void*, std::size_t), std::size_t, std::size_t, void*))

// The function at a position of the table: all versions have the first ones in common.
inline void* entry(const OrtApi* api, std::size_t position) {
  return reinterpret_cast<void* const*>(api)[position];
}

struct Ort {
#define SPECRT_ORT_MEMBER(position, name, result, parameters) result(*name) parameters;
  SPECRT_ORT_ENTRIES(SPECRT_ORT_MEMBER)
#undef SPECRT_ORT_MEMBER

  explicit Ort(const OrtApi* api) {
#define SPECRT_ORT_TAKE(position, name, result, parameters) \
  name = reinterpret_cast<decltype(name)>(entry(api, position));
    SPECRT_ORT_ENTRIES(SPECRT_ORT_TAKE)
#undef SPECRT_ORT_TAKE
  }
};

}  // namespace specrt::kernels
