// A GPU and a TensorRT over host memory, for checks where there is neither.
//
// Work that is put on a stream is done when somebody waits for it, so that what is read too early
// is found. What the libraries would punish in silence ends the program here: see `broken`.
#pragma once

#include <NvInfer.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "native/text/json.hpp"

namespace specrt::doubles {

using Id = std::int64_t;

// What the machine is like, and what goes wrong on it.
struct Machine {
  int devices = 1;
  std::string gpu = "Orin";
  int major = 8, minor = 7;
  bool integrated = false;
  std::size_t memory = std::size_t{1} << 28;
  std::array<int, 4> version{10, 3, 0, 26};
  std::string fails;  // the call that fails,
  int after = 0;      // once it went well so many times
  cudaError_t error = cudaErrorIllegalAddress;
  std::string said = "internal error";  // what TensorRT logs where it fails
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

// ---- plans: what they say about themselves, and what a pass does ----

using namespace nvinfer1;

struct Spec {
  std::int64_t batch, layers, kv_heads, head_dim, vocabulary, max_length, candidates, scratch;
  bool native, confidence;
  std::string compute;
  std::vector<std::array<std::int64_t, 6>> profiles;  // width and rows: least, best, most

  std::size_t item() const { return compute == "fp32" ? 4 : 2; }
  std::size_t needs(int profile) const {
    return static_cast<std::size_t>(scratch * (profile + 1) / 2);  // for some profiles nothing
  }
};

struct Tensor {
  std::vector<std::int64_t> shape;
  DataType type;
  bool is_input;
};

struct Plan {
  Spec spec;
  std::vector<std::string> caches;
  std::map<std::string, Tensor> tensors;
  std::vector<std::string> names;
  std::map<std::string, std::string> aliases;
  bool on_host = false;
};

// Read the plan that a test wrote.
std::shared_ptr<Plan> plan_of(const native::Json& json);

// One pass, as it was when it was enqueued.
class Pass {
 public:
  Pass(std::shared_ptr<const Plan> plan, std::map<std::string, void*> places, std::size_t width,
       std::size_t rows)
      : plan_(std::move(plan)), at_(std::move(places)), width_(width), rows_(rows) {}

  void run() const;

 private:
  template <class T>
  T* at(const std::string& name, std::size_t count) const {
    return static_cast<T*>(on_device(at_.at(name), count * sizeof(T)));
  }

  std::uint32_t mark(std::size_t cache, Id token) const;
  std::size_t place(std::size_t head, std::size_t position) const;
  char* cache(const std::string& name) const;
  void update(std::size_t number, const Id* fed, std::size_t start) const;
  std::vector<Id> tokens(std::size_t number, std::size_t count) const;
  void score(std::size_t row, const Id* seen, std::size_t count) const;
  void spoil() const;

  std::shared_ptr<const Plan> plan_;
  std::map<std::string, void*> at_;
  std::size_t width_, rows_;
};

}  // namespace specrt::doubles
