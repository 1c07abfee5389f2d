#include "native/tensorrt/engine.hpp"

#include "failure.hpp"

namespace specrt::native::tensorrt {

Ground::Ground(const Shared& shared)
    : caches(shared.record, shared.geometry, shared.max_length, stream),
      ports(shared.record, static_cast<std::size_t>(shared.geometry.vocab_size), shared.integrated,
            stream),
      scratch(shared.plan->scratch_bytes(), "working memory", stream) {}

TensorRtEngine::TensorRtEngine(std::shared_ptr<const Shared> shared) : shared_(std::move(shared)) {
  const OnDevice here;
  ground_ = std::make_unique<Ground>(*shared_);
  ways_.resize(shared_->record.profiles.size());
}

TensorRtEngine::~TensorRtEngine() {
  const OnDevice here(std::nothrow);
  if (ground_) cudaStreamSynchronize(ground_->stream.handle());  // work that a failure left
  ways_.clear();
  ground_.reset();
  shared_.reset();
}

Output TensorRtEngine::forward(const Token* tokens, std::size_t width, std::size_t start,
                               std::size_t rows) {
  check_bounds(width, start);
  const OnDevice here;
  Way& chosen = way(choose(shared_->record, width, rows));
  Ground& ground = *ground_;
  try {
    shape(chosen, width, rows);
    if (chosen.parity != ground.caches.parity()) {
      ground.caches.bind(*chosen.context);
      chosen.parity = ground.caches.parity();
    }
    ground.ports.feed(tokens, width, start, rows);
    chosen.context->enqueue(ground.stream);
    ground.ports.fetch();
    ground.stream.wait();
  } catch (const Failure& error) {
    fault_ = std::string("an earlier pass failed (") + error.what() +
             "); what the KV buffers hold is not known: open the bundle again, in a new process "
             "where the device was lost";
    throw;
  }
  ground.caches.swap();
  return ground.ports.output();
}

void TensorRtEngine::check_bounds(std::size_t width, std::size_t start) const {
  if (!fault_.empty()) throw Failure(SPECRT_ENGINE, fault_);
  if (width < 1 || width > max_width())
    throw Failure(SPECRT_ENGINE, "a pass of " + std::to_string(width) +
                                     " tokens was asked of an engine built for widths 1 to " +
                                     std::to_string(max_width()) +
                                     "; rebuild with a larger prefill or gamma");
  if (start > max_length() || width > max_length() - start)
    throw Failure(SPECRT_ENGINE,
                  "a pass of " + std::to_string(width) + " tokens would write from position " +
                      std::to_string(start) + " on of a KV buffer that has 0 to " +
                      std::to_string(max_length() - 1) + "; build with a larger max_length");
}

// The context of a profile, made on its first use and bound for good, but for the parity.
TensorRtEngine::Way& TensorRtEngine::way(std::size_t profile) {
  Way& found = ways_[profile];
  if (found.context) return found;
  Way made;
  made.context =
      shared_->plan->context(static_cast<int>(profile), ground_->scratch.at(), ground_->stream);
  ground_->ports.bind(*made.context);
  ground_->caches.bind(*made.context);
  made.parity = ground_->caches.parity();
  found = std::move(made);
  return found;
}

// Tell a context the sizes of a pass, of the inputs that may have several.
void TensorRtEngine::shape(Way& way, std::size_t width, std::size_t rows) const {
  if (way.width == width && way.rows == rows) return;
  const auto& tensors = shared_->plan->tensors();
  way.width = 0;  // until both are told
  if (tensors.at("input_ids").shape.back() < 0) way.context->shape("input_ids", {1, width});
  if (tensors.at("rows").shape.back() < 0) way.context->shape("rows", {rows});
  way.width = width;
  way.rows = rows;
}

}  // namespace specrt::native::tensorrt
