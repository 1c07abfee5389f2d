// ONNX Runtime, loaded while the process runs: one library, and what is used of its functions.
#pragma once

#include <memory>
#include <string>

#include "native/ort_types.hpp"

namespace specrt::native {

// The version of the C interface that is asked for: the first with everything that is used.
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

  // The environment of every session, made by the first that asks. With `pool` its sessions share
  // so many threads, where they can.
  const OrtEnv* environment(int pool) const;
  bool has_pool() const;

 private:
  explicit OrtLibrary(const std::string& path);

  OrtEntries call_;
  std::string path_;
  std::string version_;
};

// Empty where a call went well, else the first line of what the library said.
std::string ort_reason(const OrtEntries& call, OrtStatus* status);

}  // namespace specrt::native
