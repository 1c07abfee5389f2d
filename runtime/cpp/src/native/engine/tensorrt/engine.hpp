// A plan with KV buffers of its own: one context for each profile, and one stream.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "native/engine/protocol.hpp"
#include "native/engine/tensorrt/passes.hpp"
#include "native/engine/tensorrt/plan.hpp"

namespace specrt::native::tensorrt {

// What the engines of one model share.
struct SharedPlan {
  EngineRecord record;
  Geometry geometry;
  std::size_t max_length;
  std::size_t max_width;
  bool integrated;
  std::unique_ptr<CompiledPlan> plan;
};

// The device memory of an engine, and the stream that all its work goes through, in order.
struct EngineBuffers {
  explicit EngineBuffers(const SharedPlan& shared);

  Stream stream;
  KVBuffers caches;
  PassBuffers passes;
  DeviceMemory scratch;  // of all contexts: they run one after the other
};

// A pass that fails on the device ends the engine: the contents of its KV buffers are unknown.
// Engines of one model may run at once, each in a thread: nothing that changes is shared.
class TensorRtEngine final : public Engine {
 public:
  explicit TensorRtEngine(std::shared_ptr<const SharedPlan> shared);
  ~TensorRtEngine() override;

  Output forward(const Token* tokens, std::size_t width, std::size_t start,
                 std::size_t rows) override;
  const Geometry& geometry() const override { return shared_->geometry; }
  std::size_t max_length() const override { return shared_->max_length; }
  std::size_t max_width() const override { return shared_->max_width; }

 private:
  // A profile's context and the sizes set last; without one, the profile was not used yet.
  struct BoundContext {
    std::unique_ptr<Context> context;
    PassShape shape;
    std::size_t parity = 0;
  };

  void check_bounds(std::size_t width, std::size_t start) const;
  BoundContext& context_of(std::size_t profile);
  void shape(BoundContext& bound, const PassShape& pass) const;

  std::shared_ptr<const SharedPlan> shared_;
  std::unique_ptr<EngineBuffers> buffers_;
  std::vector<BoundContext> contexts_;  // as the profiles; closed before the buffers they run on
  std::string fault_;
};

}  // namespace specrt::native::tensorrt
