// The types of ONNX Runtime's C interface: its own header's, or those few of them that are used.
//
// The library is distributed without its header in places; its types, the numbers of its
// enumerations and the positions in its table of functions are the same in every version.
#pragma once

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
