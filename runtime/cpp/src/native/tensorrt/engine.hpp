// A plan with KV buffers of its own: one context for each profile, and one stream.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "native/engine.hpp"
#include "native/tensorrt/caches.hpp"
#include "native/tensorrt/plan.hpp"
#include "native/tensorrt/ports.hpp"

namespace specrt::native::tensorrt {

// What the engines of one model share.
struct Shared {
  EngineRecord record;
  Geometry geometry;
  std::size_t max_length;
  std::size_t max_width;
  bool integrated;
  std::unique_ptr<CompiledPlan> plan;
};

// The device memory of an engine, and the stream that all its work goes through, in order.
struct Ground {
  explicit Ground(const Shared& shared);

  Stream stream;
  Caches caches;
  Ports ports;
  DeviceMemory scratch;  // of all contexts: they run one after the other
};

// A pass that fails on the device ends the engine: nobody knows what its KV buffers hold.
// Engines of one model may run at once, each in a thread: nothing that changes is shared.
class TensorRtEngine final : public Engine {
 public:
  explicit TensorRtEngine(std::shared_ptr<const Shared> shared);
  ~TensorRtEngine() override;

  Output forward(const Token* tokens, std::size_t width, std::size_t start,
                 std::size_t rows) override;
  const Geometry& geometry() const override { return shared_->geometry; }
  std::size_t max_length() const override { return shared_->max_length; }
  std::size_t max_width() const override { return shared_->max_width; }

 private:
  // A profile's context and what it was last told; without one, the profile was not used yet.
  struct Way {
    std::unique_ptr<Context> context;
    std::size_t width = 0, rows = 0, parity = 0;
  };

  void check_bounds(std::size_t width, std::size_t start) const;
  Way& way(std::size_t profile);
  void shape(Way& way, std::size_t width, std::size_t rows) const;

  std::shared_ptr<const Shared> shared_;
  std::unique_ptr<Ground> ground_;
  std::vector<Way> ways_;  // as the profiles; closed before the ground they run on
  std::string fault_;
};

}  // namespace specrt::native::tensorrt
