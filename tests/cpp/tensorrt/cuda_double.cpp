#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

#include "tensorrt/double.hpp"

struct CUstream_st {
  std::deque<std::function<void()>> work;
  specrt::doubles::Alive alive;
};

namespace specrt::doubles {

Machine machine;

namespace {

enum class Kind { kDevice, kPinned, kMapped };
struct Block {
  std::size_t bytes;
  Kind kind;
  std::unique_ptr<Alive> alive;
};

std::mutex mutex;
std::map<const char*, Block> blocks;
std::atomic<int> living{0};
thread_local std::size_t fetched = 0;
thread_local int current = 0;

std::size_t in_use() {
  std::size_t all = 0;
  for (const auto& [address, block] : blocks) all += block.kind == Kind::kDevice ? block.bytes : 0;
  return all;
}

cudaError_t take(void** address, std::size_t bytes, Kind kind, const char* call) {
  if (current != 0) broken(std::string(call) + " on another GPU");
  const std::lock_guard<std::mutex> lock(mutex);
  if (fails(call)) return machine.error;
  if (kind == Kind::kDevice && in_use() + bytes > machine.memory) return cudaErrorMemoryAllocation;
  char* made = static_cast<char*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  std::memset(made, 0xA5, bytes);  // memory is not cleared by itself
  blocks[made] = {bytes, kind, std::make_unique<Alive>()};
  *address = made;
  return cudaSuccess;
}

cudaError_t give(void* address, bool device) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = blocks.find(static_cast<char*>(address));
  if (found == blocks.end() || (found->second.kind == Kind::kDevice) != device)
    broken("memory was given back that was not taken");
  blocks.erase(found);
  std::free(address);
  return cudaSuccess;
}

bool holds(const void* address, std::size_t bytes, bool device) {
  const std::lock_guard<std::mutex> lock(mutex);
  const char* at = static_cast<const char*>(address);
  auto found = blocks.upper_bound(at);
  if (found == blocks.begin()) return false;
  --found;
  const Block& block = found->second;
  const bool kind = device ? block.kind != Kind::kPinned : block.kind != Kind::kDevice;
  const auto offset = static_cast<std::size_t>(at - found->first);
  return kind && offset <= block.bytes && bytes <= block.bytes - offset;
}

}  // namespace

bool fails(const char* call) { return machine.fails == call && machine.after-- == 0; }

void broken(const std::string& what) {
  std::printf("misused: %s\n", what.c_str());
  std::fflush(stdout);
  std::abort();
}

void* on_device(const void* address, std::size_t bytes) {
  if (!holds(address, bytes, true)) broken("an address that the device does not have");
  return const_cast<void*>(address);
}

void enqueue(cudaStream_t stream, std::function<void()> work) {
  if (stream == nullptr) broken("work without a stream");
  if (current != 0) broken("work put on a stream from another GPU");
  stream->work.push_back(std::move(work));
}

std::size_t bytes_fetched() { return fetched; }
Alive::Alive() { ++living; }
Alive::~Alive() { --living; }
int alive() { return living; }

}  // namespace specrt::doubles

using namespace specrt::doubles;

extern "C" {

const char* cudaGetErrorName(cudaError_t error) {
  if (error == cudaErrorInsufficientDriver) return "cudaErrorInsufficientDriver";
  return error == cudaErrorIllegalAddress ? "cudaErrorIllegalAddress" : "another error";
}

const char* cudaGetErrorString(cudaError_t) { return "as the double was told"; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }

cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  current = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = machine.devices;
  return fails("cudaGetDeviceCount") ? machine.error : cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* prop, int device) {
  if (device != 0) broken("properties of another GPU");
  std::snprintf(prop->name, sizeof prop->name, "%s", machine.gpu.c_str());
  prop->major = machine.major;
  prop->minor = machine.minor;
  prop->integrated = prop->canMapHostMemory = machine.integrated ? 1 : 0;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const std::lock_guard<std::mutex> lock(mutex);
  *total = machine.memory;
  *free = machine.memory - std::min(machine.memory, in_use());
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** devPtr, size_t size) {
  return take(devPtr, size, Kind::kDevice, "cudaMalloc");
}

cudaError_t cudaFree(void* devPtr) { return give(devPtr, true); }

cudaError_t cudaHostAlloc(void** pHost, size_t size, unsigned int flags) {
  const bool mapped = (flags & cudaHostAllocMapped) != 0;
  return take(pHost, size, mapped ? Kind::kMapped : Kind::kPinned, "cudaHostAlloc");
}

cudaError_t cudaHostGetDevicePointer(void** pDevice, void* pHost, unsigned int) {
  *pDevice = on_device(pHost, 1);
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* ptr) { return give(ptr, false); }

cudaError_t cudaMemsetAsync(void* devPtr, int value, size_t count, cudaStream_t stream) {
  if (fails("cudaMemsetAsync")) return machine.error;
  on_device(devPtr, count);
  enqueue(stream, [=] { std::memset(devPtr, value, count); });
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t count, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  if (fails("cudaMemcpyAsync")) return machine.error;
  const bool sends = kind == cudaMemcpyHostToDevice;
  if (!sends && kind != cudaMemcpyDeviceToHost) broken("a copy of another kind");
  if (!holds(sends ? dst : src, count, true) || !holds(sends ? src : dst, count, false))
    broken("a copy that leaves its memory, or is not pinned");
  if (!sends) fetched += count;
  enqueue(stream, [=] { std::memcpy(dst, src, count); });
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* pStream, unsigned int flags) {
  if (flags != cudaStreamNonBlocking) broken("a stream that waits for others");
  if (fails("cudaStreamCreateWithFlags")) return machine.error;
  *pStream = new CUstream_st;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  for (; !stream->work.empty(); stream->work.pop_front()) stream->work.front()();
  return fails("cudaStreamSynchronize") ? machine.error : cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (!stream->work.empty()) broken("a stream was closed with work on it");
  delete stream;
  return cudaSuccess;
}
}
