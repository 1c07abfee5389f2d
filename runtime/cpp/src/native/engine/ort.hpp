// ONNX Runtime behind the engine: bindings made once per width, KV buffers updated in place.
#pragma once

#include <cstdlib>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "native/bundle/bundle.hpp"
#include "native/engine/ort_library.hpp"

namespace specrt::native {

// What an engine is besides its graph; see specrt.engine.ort.OrtEngine.
struct OrtSettings {
  Geometry geometry;
  int batch = 1;
  std::size_t max_length = 0;  // as built; one less is used with `pad_single_token`
  std::size_t max_width = 0;
  bool pad_single_token = false;  // a single token has a pad token beside it
  bool pad_to_even = false;       // every pass of an odd width has
};

// Zeroed memory, whose pages cost nothing until they are written.
class Buffer {
 public:
  Buffer(std::size_t items, std::size_t item_bytes);
  void* get() const { return memory_.get(); }
  template <typename T>
  T* as() const {
    return static_cast<T*>(memory_.get());
  }

 private:
  std::unique_ptr<void, decltype(&std::free)> memory_;
};

// Kernels compute rows several at a time, and round a single row differently, which quantized
// products that follow make a step of an activation. So an engine with `pad_single_token` puts a
// pad token beside a single one, whose keys are overwritten before they are read; and with
// `pad_to_even` every pass of an odd width, and an odd number of rows one more to be scored. The
// last position is reserved for them.
class OrtEngine : public Engine {
 public:
  OrtEngine(std::shared_ptr<const SharedSession> session, const OrtSettings& settings);

  Output forward(const Token* tokens, std::size_t width, std::size_t start,
                 std::size_t rows) override;
  const Geometry& geometry() const override { return settings_.geometry; }
  std::size_t max_length() const override {
    return settings_.max_length - settings_.pad_single_token;
  }
  std::size_t max_width() const override { return settings_.max_width; }

 protected:
  // What a pass reads besides tokens: how many there are with those that only fill up, and how
  // many rows are scored with them.
  struct Extent {
    std::size_t width, rows, tokens, scored;
  };
  virtual Extent extent(std::size_t width, std::size_t rows) const;
  virtual void bind_more(Binding& binding, const Extent& extent);
  // Put everything in place but the tokens.
  virtual void fill(const Extent& extent, std::size_t start);
  virtual std::vector<std::int64_t> scored_shape(const Extent& extent) const;
  // Allocate KV buffers of one row; `suffix` is what their names end in.
  void allocate(const std::string& suffix);
  void bind_cache(Binding& binding, const std::string& name, void* memory) const;

  struct Cache {
    std::string name;
    OrtPort port;
    Buffer memory;
  };

  const std::shared_ptr<const SharedSession> session_;
  const OrtSettings settings_;
  std::vector<Cache> caches_;
  Buffer tokens_;
  Buffer rows_;
  Buffer start_;

 private:
  void check(std::size_t width, std::size_t start, std::size_t rows) const;
  Binding& bound(const Extent& extent);

  Buffer argmax_;
  Buffer logits_;
  Buffer confidence_;
  const bool is_confident_;
  std::map<std::pair<std::size_t, std::size_t>, std::unique_ptr<Binding>> passes_;
};

// An engine of several rows, of which one is fed; see specrt.engine.ort_packed. The others do
// their attention in scratch memory.
class PackedEngine : public OrtEngine {
 public:
  PackedEngine(std::shared_ptr<const SharedSession> session, const OrtSettings& settings);

 protected:
  Extent extent(std::size_t width, std::size_t rows) const override;
  void bind_more(Binding& binding, const Extent& extent) override;
  void fill(const Extent& extent, std::size_t start) override;
  std::vector<std::int64_t> scored_shape(const Extent& extent) const override;

 private:
  std::size_t places() const { return settings_.pad_single_token ? 2 : 1; }

  bool has_positions_;
  Buffer positions_;
  Buffer widths_;
  Buffer spread_;
  Buffer kept_;
  std::unique_ptr<Buffer> scratch_kv_;
};

}  // namespace specrt::native
