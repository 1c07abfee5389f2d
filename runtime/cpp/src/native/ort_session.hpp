// A saved graph of ONNX Runtime, and what a pass over it binds.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "native/ort_library.hpp"

namespace specrt::native {

struct OrtPort {
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  std::vector<std::int64_t> shape;
};

// Weights and graph, loaded once. Any thread; bindings run at once.
class SharedSession {
 public:
  // `threads` of its own, or those of the pool where the process has one; `widens` turns weights
  // stored in half precision into fp32, once. Throws Failure(SPECRT_ENGINE) when refused.
  SharedSession(const OrtLibrary& library, const std::string& path, int threads, bool widens);
  ~SharedSession();
  SharedSession(const SharedSession&) = delete;
  SharedSession& operator=(const SharedSession&) = delete;

  const std::map<std::string, OrtPort>& inputs() const { return inputs_; }
  bool has_output(const std::string& name) const { return outputs_.count(name) > 0; }
  const OrtLibrary& library() const { return library_; }
  OrtSession* get() const { return session_; }

 private:
  std::string open(const std::string& path, int threads, bool widens, bool pooled);
  void describe();

  const OrtLibrary& library_;
  OrtSession* session_ = nullptr;
  std::map<std::string, OrtPort> inputs_;
  std::set<std::string> outputs_;
};

// Memory bound to the inputs and outputs of a session; it outlives the binding.
class Binding {
 public:
  explicit Binding(const SharedSession& session);
  ~Binding();
  Binding(const Binding&) = delete;
  Binding& operator=(const Binding&) = delete;

  struct Place {
    void* memory;
    ONNXTensorElementDataType type;
    std::vector<std::int64_t> shape;
  };
  void input(const std::string& name, const Place& place);
  void output(const std::string& name, const Place& place);
  // Run a pass. `width` is for the message of Failure(SPECRT_ENGINE).
  void run(std::size_t width);

 private:
  OrtValue* value(const std::string& name, const Place& place);
  void check(OrtStatus* status, const std::string& what) const;

  const SharedSession& session_;
  OrtMemoryInfo* memory_ = nullptr;
  OrtIoBinding* binding_ = nullptr;
  std::vector<OrtValue*> values_;
};

std::size_t ort_item_bytes(ONNXTensorElementDataType type);

}  // namespace specrt::native
