// Plans of the double of TensorRT: what they say about themselves, and what a pass does.
#pragma once

#include <NvInfer.h>

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "native/text/json.hpp"
#include "tensorrt/double.hpp"

namespace specrt::doubles {

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
