// The CUDA runtime, with every answer checked: memory, copies, and a stream that they go through.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <initializer_list>
#include <new>
#include <string>

namespace specrt::native::tensorrt {

constexpr std::size_t kAlignment = 256;  // of every address that is bound to a tensor of a plan

// The bytes that memory of a size takes with what follows it aligned.
std::size_t aligned(std::size_t bytes);
// The product of some sizes. Throws Failure(SPECRT_ENGINE) where it is beyond any memory.
std::size_t product(std::initializer_list<std::size_t> sizes);
// A number of bytes for people.
std::string shown_bytes(std::size_t bytes);

// Throws Failure(SPECRT_ENGINE) saying what was being done and what CUDA answered.
void check(const std::string& doing, cudaError_t code);
inline void check(const char* doing, cudaError_t code) {
  if (code != cudaSuccess) check(std::string(doing), code);
}
// What to add to a message of TensorRT: that the device is lost to this process, or nothing.
std::string lost(const std::string& message);

constexpr int kDevice = 0;

// Lets CUDA calls of this thread, TensorRT's too, go to the device, and leaves the application's
// own choice as it was.
class OnDevice {
 public:
  OnDevice();
  explicit OnDevice(std::nothrow_t) noexcept;  // where nothing may fail, such as closing
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = kDevice;
};

// One GPU as CUDA describes it.
struct Gpu {
  std::string name;
  std::string capability;   // as in "8.7"
  bool integrated = false;  // host and device share memory, as on a Jetson
};
// Throws Failure(SPECRT_ENGINE) where there is none.
Gpu find_gpu();

class Stream {
 public:
  Stream();
  ~Stream();  // waits for what is on it
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  cudaStream_t handle() const { return stream_; }
  void wait() const;
  // Copy in stream order. What is on the host must be pinned, or the copy may wait.
  void copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) const;

 private:
  cudaStream_t stream_ = nullptr;
};

// Memory of the device, cleared.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  // `purpose` is for the message where there is not enough.
  DeviceMemory(std::size_t bytes, const char* purpose, const Stream& stream);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  char* at(std::size_t offset = 0) const { return static_cast<char*>(memory_) + offset; }

 private:
  void* memory_ = nullptr;
};

// Pinned host memory, cleared.
class HostMemory {
 public:
  HostMemory(std::size_t bytes, bool mapped);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  char* at(std::size_t offset = 0) const { return static_cast<char*>(memory_) + offset; }

 private:
  void* memory_ = nullptr;
};

// Host memory that the device reads or writes, and where the device finds it. On an integrated GPU
// both are one memory, and nothing is copied.
class Staging {
 public:
  Staging(std::size_t bytes, const char* purpose, bool integrated, const Stream& stream);

  char* host(std::size_t offset = 0) const { return host_.at(offset); }
  char* device(std::size_t offset = 0) const { return address_ + offset; }
  void send() const;   // host to device, in stream order
  void fetch() const;  // device to host

 private:
  std::size_t bytes_;
  bool shared_;
  const Stream& stream_;
  HostMemory host_;
  DeviceMemory device_;
  char* address_;
};

}  // namespace specrt::native::tensorrt
