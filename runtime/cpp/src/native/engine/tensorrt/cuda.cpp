#include "native/engine/tensorrt/cuda.hpp"

#include <algorithm>
#include <cctype>
#include <iterator>
#include <limits>

#include "failure.hpp"
#include "native/text/json.hpp"

namespace specrt::native::tensorrt {

namespace {

constexpr const char* kRemedy = "the device is lost to this process: start it again";

// Errors after which every call of the process fails, as the CUDA runtime documents them.
constexpr cudaError_t kLost[] = {
    cudaErrorECCUncorrectable,
    cudaErrorNvlinkUncorrectable,
    cudaErrorIllegalAddress,
    cudaErrorLaunchTimeout,
    cudaErrorContextIsDestroyed,
    cudaErrorAssert,
    cudaErrorHardwareStackError,
    cudaErrorIllegalInstruction,
    cudaErrorMisalignedAddress,
    cudaErrorInvalidAddressSpace,
    cudaErrorInvalidPc,
    cudaErrorLaunchFailure,
    cudaErrorMpsClientTerminated,
    cudaErrorExternalDevice,
    cudaErrorUnknown,
    // cudaErrorContained and cudaErrorTensorMemoryLeak, which older toolkits do not name.
    static_cast<cudaError_t>(226),
    static_cast<cudaError_t>(721),
};

// How CUDA words those that kernels can cause, and how TensorRT numbers them.
constexpr const char* kSigns[] = {
    "illegal memory access",   "unspecified launch failure",
    "uncorrectable ecc",       "hardware stack",
    "misaligned address",      "illegal instruction",
    "launch timed out",        "device-side assert",
    "invalid program counter", "cudaerror 700",
    "cudaerror 719",           "cudaerror 214",
};

std::string remedy(cudaError_t code) {
  if (std::find(std::begin(kLost), std::end(kLost), code) != std::end(kLost)) return kRemedy;
  if (code == cudaErrorInsufficientDriver || code == cudaErrorCallRequiresNewerDriver)
    return "install the NVIDIA driver, or a newer one; `specrt doctor` tells what this machine has";
  if (code == cudaErrorNoDevice)
    return "run the bundle where there is an NVIDIA GPU, or build it for this machine with "
           "`specrt build RECIPE --backend ort-cpu`";
  return "`specrt doctor` tells what this machine has";
}

[[noreturn]] void lacks(const char* purpose, std::size_t bytes) {
  cudaGetLastError();  // clears the error, which does not stick
  std::size_t free = 0, total = 0;
  std::string there = "less is free";
  if (cudaMemGetInfo(&free, &total) == cudaSuccess)
    there = shown_bytes(free) + " of " + shown_bytes(total) + " are free";
  throw Failure(SPECRT_ENGINE, std::string("cannot allocate ") + purpose + ": " +
                                   shown_bytes(bytes) + " are needed and " + there +
                                   " on the GPU; close what else uses it, or build with a smaller "
                                   "max_length or precision");
}

void reserve(const char* purpose, std::size_t bytes, cudaError_t code) {
  if (code == cudaErrorMemoryAllocation) lacks(purpose, bytes);
  if (code != cudaSuccess) check(std::string("allocate ") + purpose, code);
}

}  // namespace

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::size_t product(std::initializer_list<std::size_t> sizes) {
  std::size_t all = 1;
  for (const std::size_t size : sizes) {
    if (size != 0 && all > std::numeric_limits<std::size_t>::max() / 4 / size)
      throw Failure(SPECRT_ENGINE,
                    "the bundle asks for buffers beyond any memory; build the bundle again with "
                    "`specrt build RECIPE`");
    all *= size;
  }
  return all;
}

std::string shown_bytes(std::size_t bytes) {
  constexpr std::size_t kGib = std::size_t{1} << 30;
  const bool large = bytes >= kGib / 100;
  const double units = static_cast<double>(bytes) / static_cast<double>(large ? kGib : kGib >> 10);
  return decimal(units, 2) + (large ? " GiB" : " MiB");
}

void check(const std::string& doing, cudaError_t code) {
  if (code == cudaSuccess) return;
  throw Failure(SPECRT_ENGINE, "cannot " + doing + ": " + cudaGetErrorName(code) + " (" +
                                   cudaGetErrorString(code) + "); " + remedy(code));
}

std::string lost(const std::string& message) {
  std::string low = message;
  std::transform(low.begin(), low.end(), low.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const bool is_lost = std::any_of(std::begin(kSigns), std::end(kSigns), [&](const char* sign) {
    return low.find(sign) != std::string::npos;
  });
  return is_lost ? std::string("; ") + kRemedy : "";
}

OnDevice::OnDevice() {
  check("ask which GPU is in use", cudaGetDevice(&before_));
  if (before_ != kDevice) check("use GPU 0", cudaSetDevice(kDevice));
}

OnDevice::OnDevice(std::nothrow_t) noexcept {
  if (cudaGetDevice(&before_) == cudaSuccess && before_ != kDevice) cudaSetDevice(kDevice);
}

OnDevice::~OnDevice() {
  if (before_ != kDevice) cudaSetDevice(before_);
}

Gpu find_gpu() {
  int count = 0;
  check("find an NVIDIA GPU", cudaGetDeviceCount(&count));
  if (count < 1) check("find an NVIDIA GPU", cudaErrorNoDevice);
  cudaDeviceProp properties{};
  check("ask what GPU 0 is", cudaGetDeviceProperties(&properties, kDevice));
  Gpu gpu;
  gpu.name.assign(properties.name,
                  std::find(std::begin(properties.name), std::end(properties.name), '\0'));
  gpu.capability = std::to_string(properties.major) + "." + std::to_string(properties.minor);
  gpu.integrated = properties.integrated != 0 && properties.canMapHostMemory != 0;
  return gpu;
}

Stream::Stream() {
  check("create a stream", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

Stream::~Stream() {
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
}

void Stream::wait() const { check("wait for the device", cudaStreamSynchronize(stream_)); }

void Stream::copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) const {
  check(kind == cudaMemcpyHostToDevice ? "copy to the device" : "copy from the device",
        cudaMemcpyAsync(to, from, bytes, kind, stream_));
}

DeviceMemory::DeviceMemory(std::size_t bytes, const char* purpose, const Stream& stream) {
  if (bytes == 0) return;
  reserve(purpose, bytes, cudaMalloc(&memory_, bytes));
  cudaError_t code = cudaMemsetAsync(memory_, 0, bytes, stream.handle());
  // Waited for, so that what a failure gives back at once is not written any more.
  if (code == cudaSuccess) code = cudaStreamSynchronize(stream.handle());
  if (code != cudaSuccess) {
    cudaFree(memory_);
    check(std::string("clear ") + purpose, code);
  }
}

DeviceMemory::~DeviceMemory() {
  if (memory_ != nullptr) cudaFree(memory_);
}

HostMemory::HostMemory(std::size_t bytes, bool mapped) {
  const unsigned flags = mapped ? cudaHostAllocMapped : cudaHostAllocDefault;
  reserve("pinned host memory", bytes, cudaHostAlloc(&memory_, bytes, flags));
  std::fill_n(static_cast<char*>(memory_), bytes, '\0');
}

HostMemory::~HostMemory() {
  if (memory_ != nullptr) cudaFreeHost(memory_);
}

Staging::Staging(std::size_t bytes, const char* purpose, bool integrated, const Stream& stream)
    : bytes_(bytes),
      shared_(integrated),
      stream_(stream),
      host_(bytes, integrated),
      device_(integrated ? 0 : bytes, purpose, stream),
      address_(device_.at()) {
  if (!shared_) return;
  void* address = nullptr;
  check("map host memory", cudaHostGetDevicePointer(&address, host_.at(), 0));
  address_ = static_cast<char*>(address);
}

void Staging::send() const {
  if (!shared_) stream_.copy(address_, host_.at(), bytes_, cudaMemcpyHostToDevice);
}

void Staging::fetch() const {
  if (!shared_) stream_.copy(host_.at(), address_, bytes_, cudaMemcpyDeviceToHost);
}

}  // namespace specrt::native::tensorrt
