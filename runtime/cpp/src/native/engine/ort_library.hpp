// ONNX Runtime, loaded at run time: a session with the CPU kernels, and the bindings of a pass.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/onnxruntime.hpp"

namespace specrt::native {

class OrtLibrary {
 public:
  // The library of this process. The first caller loads it: from `path`, else from where this
  // library was configured, else where the system finds it. Throws Failure(SPECRT_ENGINE) where it
  // cannot be loaded or is too old, and where another one was loaded before.
  static const OrtLibrary& load(const std::string& path);
  // The one that was loaded; nullptr before.
  static const OrtLibrary* loaded();

  const OrtEntries& call() const { return call_; }
  const OrtApiBase& base() const { return *base_; }
  const std::string& version() const { return version_; }

  // The environment of every session, made on first use. With `pool` its sessions share
  // so many threads, where they can.
  const OrtEnv* environment(int pool) const;
  bool has_pool() const;

 private:
  explicit OrtLibrary(const std::string& path);

  OrtEntries call_;
  const OrtApiBase* base_ = nullptr;
  std::string path_;
  std::string version_;
};

// Empty where a call went well, else the first line of the library's message.
std::string ort_reason(const OrtEntries& call, OrtStatus* status);

struct OrtPort {
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  std::vector<std::int64_t> shape;
};

// Weights and graph, loaded once. Any thread; bindings run at once.
class SharedSession {
 public:
  // `threads` of its own, or those of the pool where the process has one. Throws
  // Failure(SPECRT_ENGINE) when refused.
  SharedSession(const OrtLibrary& library, const std::string& path, int threads);
  ~SharedSession();
  SharedSession(const SharedSession&) = delete;
  SharedSession& operator=(const SharedSession&) = delete;

  const std::map<std::string, OrtPort>& inputs() const { return inputs_; }
  const std::map<std::string, OrtPort>& outputs() const { return outputs_; }
  const OrtLibrary& library() const { return library_; }
  OrtSession* get() const { return session_; }

 private:
  std::string open(const std::string& path, int threads, bool pooled);
  void describe();

  const OrtLibrary& library_;
  OrtSession* session_ = nullptr;
  std::map<std::string, OrtPort> inputs_;
  std::map<std::string, OrtPort> outputs_;
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

}  // namespace specrt::native
