// A GPU and a TensorRT over host memory, for checks where there is neither.
//
// Work that is put on a stream is done when somebody waits for it, so that what is read too early
// is found. What the libraries would punish in silence ends the program here: see `broken`.
#pragma once

#include <NvInfer.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace specrt::doubles {

using Id = std::int64_t;

// What the machine is like, and what goes wrong on it.
struct Machine {
  int devices, major, minor;
  std::string gpu;
  bool integrated;
  std::size_t memory;
  std::vector<int> version;
  std::string fails;  // the call that fails,
  int after;          // once it went well so many times
  cudaError_t error;
  std::string said;  // what TensorRT logs where it fails
};
extern Machine machine;

// Whether it is the turn of this call to fail.
bool fails(const char* call);
// End the program: the libraries were misused.
[[noreturn]] void broken(const std::string& what);

// Memory of the device at an address, which must be all there.
void* on_device(const void* address, std::size_t bytes);
// Put work on a stream.
void enqueue(cudaStream_t stream, std::function<void()> work);
// How many bytes this thread ever copied from the device.
std::size_t bytes_fetched();
// The profile of the pass that this thread last put on a stream.
int& last_profile();

// Counts what was made and not given back: memory, streams, runtimes, plans, contexts.
struct Alive {
  Alive();
  ~Alive();
  Alive(const Alive&) = delete;
  Alive& operator=(const Alive&) = delete;
};
int alive();

// What the model in every plan says after some tokens.
std::vector<float> scores_after(const Id* tokens, std::size_t count, std::size_t vocabulary);
Id likeliest(const std::vector<float>& scores);
float confidence_of(const std::vector<float>& scores);

}  // namespace specrt::doubles
