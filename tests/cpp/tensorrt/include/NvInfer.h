// Stand-in for TensorRT's header: only what the native implementation uses, with the names and the
// signatures that TensorRT has. Functions are pure here, and implemented by double.cpp.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "NvInferVersion.h"

namespace nvinfer1 {

using AsciiChar = char;

enum class DataType : int32_t { kFLOAT = 0, kHALF = 1, kINT8 = 2, kBF16 = 7, kINT64 = 8 };
enum class TensorLocation : int32_t { kDEVICE = 0, kHOST = 1 };
enum class TensorIOMode : int32_t { kNONE = 0, kINPUT = 1, kOUTPUT = 2 };
enum class OptProfileSelector : int32_t { kMIN = 0, kOPT = 1, kMAX = 2 };
enum class ExecutionContextAllocationStrategy : int32_t { kSTATIC = 0, kUSER_MANAGED = 2 };

class Dims64 {
 public:
  static constexpr int32_t MAX_DIMS{8};
  int32_t nbDims;
  int64_t d[MAX_DIMS];
};
using Dims = Dims64;

class INoCopy {
 protected:
  INoCopy() = default;
  virtual ~INoCopy() = default;
  INoCopy(INoCopy const&) = delete;
  INoCopy& operator=(INoCopy const&) = delete;
};

class ILogger {
 public:
  enum class Severity : int32_t { kINTERNAL_ERROR = 0, kERROR = 1, kWARNING = 2 };
  virtual void log(Severity severity, AsciiChar const* msg) noexcept = 0;
  ILogger() = default;
  virtual ~ILogger() = default;
};

class IExecutionContext : public INoCopy {
 public:
  virtual ~IExecutionContext() noexcept = default;
  virtual bool setOptimizationProfileAsync(int32_t profileIndex, cudaStream_t stream) noexcept = 0;
  virtual bool setInputShape(char const* tensorName, Dims const& dims) noexcept = 0;
  virtual bool setTensorAddress(char const* tensorName, void* data) noexcept = 0;
  virtual void setDeviceMemoryV2(void* memory, int64_t size) noexcept = 0;
  virtual bool enqueueV3(cudaStream_t stream) noexcept = 0;
};

#ifdef STAND_IN_RTX
enum class DynamicShapesKernelSpecializationStrategy : int32_t { kLAZY = 0, kEAGER = 1, kNONE = 2 };
enum class CudaGraphStrategy : int32_t { kDISABLED = 0, kWHOLE_GRAPH_CAPTURE = 1 };
enum class EngineValidity : int32_t { kVALID = 0, kSUBOPTIMAL = 1, kINVALID = 2 };
enum class EngineInvalidityDiagnostics : uint64_t {
  kVERSION_MISMATCH = 1,
  kUNSUPPORTED_CC = 2,
  kOLD_CUDA_DRIVER = 4,
  kOLD_CUDA_RUNTIME = 8,
  kINSUFFICIENT_GPU_MEMORY = 16,
  kMALFORMED_ENGINE = 32,
  kCUDA_ERROR = 64,
};

class IRuntimeCache : public INoCopy {
 public:
  virtual ~IRuntimeCache() noexcept = default;
  virtual bool deserialize(void const* blob, size_t size) noexcept = 0;
};

class IRuntimeConfig : public INoCopy {
 public:
  virtual ~IRuntimeConfig() noexcept = default;
  virtual void setExecutionContextAllocationStrategy(
      ExecutionContextAllocationStrategy strategy) noexcept = 0;
  virtual void setDynamicShapesKernelSpecializationStrategy(
      DynamicShapesKernelSpecializationStrategy strategy) noexcept = 0;
  virtual bool setCudaGraphStrategy(CudaGraphStrategy strategy) noexcept = 0;
  virtual IRuntimeCache* createRuntimeCache() const noexcept = 0;
  virtual bool setRuntimeCache(IRuntimeCache const& cache) noexcept = 0;
};
#endif

class ICudaEngine : public INoCopy {
 public:
  virtual ~ICudaEngine() noexcept = default;
  virtual int32_t getNbIOTensors() const noexcept = 0;
  virtual char const* getIOTensorName(int32_t index) const noexcept = 0;
  virtual Dims getTensorShape(char const* tensorName) const noexcept = 0;
  virtual DataType getTensorDataType(char const* tensorName) const noexcept = 0;
  virtual TensorLocation getTensorLocation(char const* tensorName) const noexcept = 0;
  virtual TensorIOMode getTensorIOMode(char const* tensorName) const noexcept = 0;
  virtual Dims getProfileShape(char const* tensorName, int32_t profileIndex,
                               OptProfileSelector select) const noexcept = 0;
  virtual int32_t getNbOptimizationProfiles() const noexcept = 0;
  virtual int64_t getDeviceMemorySizeV2() const noexcept = 0;
  virtual bool setWeightStreamingBudgetV2(int64_t gpuMemoryBudget) noexcept = 0;
  virtual int64_t getWeightStreamingBudgetV2() const noexcept = 0;
  virtual int64_t getWeightStreamingAutomaticBudget() const noexcept = 0;
#ifdef STAND_IN_ALIASES
  virtual char const* getAliasedInputTensor(char const* tensorName) const noexcept = 0;
#endif
#ifdef STAND_IN_RTX
  virtual IRuntimeConfig* createRuntimeConfig() noexcept = 0;
  virtual IExecutionContext* createExecutionContext(IRuntimeConfig* runtimeConfig) noexcept = 0;
#else
  virtual IExecutionContext* createExecutionContext(
      ExecutionContextAllocationStrategy strategy =
          ExecutionContextAllocationStrategy::kSTATIC) noexcept = 0;
#endif
};

class IRuntime : public INoCopy {
 public:
  virtual ~IRuntime() noexcept = default;
  virtual ICudaEngine* deserializeCudaEngine(void const* blob, std::size_t size) noexcept = 0;
#ifdef STAND_IN_RTX
  virtual EngineValidity getEngineValidity(void const* blob, int64_t blobSize,
                                           uint64_t* diagnostics) const noexcept = 0;
#else
  virtual void setEngineHostCodeAllowed(bool allowed) noexcept = 0;
#endif
};

IRuntime* createInferRuntime(ILogger& logger) noexcept;

}  // namespace nvinfer1

extern "C" {
int32_t getInferLibMajorVersion() noexcept;
int32_t getInferLibMinorVersion() noexcept;
int32_t getInferLibPatchVersion() noexcept;
int32_t getInferLibBuildVersion() noexcept;
}
