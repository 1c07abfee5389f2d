#include "native/engine/tensorrt/engine.hpp"

#include <new>

#include "failure.hpp"
#include "native/engine/backends.hpp"
#include "native/engine/tensorrt/passes.hpp"
#include "native/engine/tensorrt/record.hpp"

namespace specrt::native::tensorrt {

EngineBuffers::EngineBuffers(const SharedPlan& shared)
    : caches(shared.record, shared.geometry, shared.max_length, stream),
      passes(shared.record, static_cast<std::size_t>(shared.geometry.vocab_size), shared.max_length,
             shared.integrated, stream),
      scratch(shared.plan->scratch_bytes(), "working memory", stream) {}

TensorRtEngine::TensorRtEngine(std::shared_ptr<const SharedPlan> shared)
    : shared_(std::move(shared)) {
  const OnDevice here;
  buffers_ = std::make_unique<EngineBuffers>(*shared_);
  contexts_.resize(shared_->record.profiles.size());
}

TensorRtEngine::~TensorRtEngine() {
  const OnDevice here(std::nothrow);
  if (buffers_) cudaStreamSynchronize(buffers_->stream.handle());  // work that a failure left
  contexts_.clear();
  buffers_.reset();
  shared_.reset();
}

Output TensorRtEngine::forward(const Token* tokens, std::size_t width, std::size_t start,
                               std::size_t rows) {
  check_bounds(width, start);
  const OnDevice here;
  const PassShape pass{width, rows, shared_->record.kv_length(start + width)};
  BoundContext& chosen = context_of(choose(shared_->record, pass));
  EngineBuffers& buffers = *buffers_;
  try {
    shape(chosen, pass);
    if (chosen.parity != buffers.caches.parity()) {
      buffers.caches.bind(*chosen.context);
      chosen.parity = buffers.caches.parity();
    }
    buffers.passes.feed(tokens, width, start, rows);
    chosen.context->enqueue(buffers.stream);
    buffers.passes.fetch();
    buffers.stream.wait();
  } catch (const Failure& error) {
    fault_ = std::string("an earlier pass failed (") + error.what() +
             "); what the KV buffers hold is not known: open the bundle again, in a new process "
             "where the device was lost";
    throw;
  }
  buffers.caches.swap();
  return buffers.passes.output();
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
TensorRtEngine::BoundContext& TensorRtEngine::context_of(std::size_t profile) {
  BoundContext& found = contexts_[profile];
  if (found.context) return found;
  BoundContext bound;
  bound.context =
      shared_->plan->context(static_cast<int>(profile), buffers_->scratch.at(), buffers_->stream);
  buffers_->passes.bind(*bound.context);
  buffers_->caches.bind(*bound.context);
  bound.parity = buffers_->caches.parity();
  found = std::move(bound);
  return found;
}

// Tell a context the sizes of a pass, of the inputs that may have several.
void TensorRtEngine::shape(BoundContext& bound, const PassShape& pass) const {
  if (bound.shape == pass) return;
  const auto varies = [&](const char* name) {
    const auto found = shared_->plan->tensors().find(name);
    return found != shared_->plan->tensors().end() && found->second.shape.back() < 0;
  };
  bound.shape = PassShape{};  // until all are set
  if (varies("input_ids")) bound.context->shape("input_ids", {1, pass.width});
  if (varies("rows")) bound.context->shape("rows", {pass.rows});
  if (varies(kKvLength)) bound.context->shape(kKvLength, {pass.kv_length});
  bound.shape = pass;
}

namespace {

class TensorRtModel final : public Model {
 public:
  explicit TensorRtModel(std::shared_ptr<const SharedPlan> shared) : shared_(std::move(shared)) {}
  ~TensorRtModel() override {
    const OnDevice here(std::nothrow);
    shared_.reset();
  }

  std::unique_ptr<Engine> engine() override { return std::make_unique<TensorRtEngine>(shared_); }

 private:
  std::shared_ptr<const SharedPlan> shared_;  // the weights live as long as an engine uses them
};

// Refuse what only the hosted implementation runs.
void check_supported(const std::string& path, const EngineRecord& record, int batch) {
  if (batch != 1)
    throw Failure(SPECRT_UNSUPPORTED,
                  path + " was built for " + std::to_string(batch) +
                      " texts at once, and the native library runs plans of one; set batch = 1 in "
                      "the recipe and build again, or use the hosted library");
  if (record.stripped)
    throw Failure(SPECRT_UNSUPPORTED,
                  path +
                      " holds no weights, and the native library cannot fill it; build without "
                      "`stripped`, or use the hosted library");
}

std::string beside(const std::string& file, const char* name) {
  return file.substr(0, file.rfind('/') + 1) + name;
}

}  // namespace

}  // namespace specrt::native::tensorrt

namespace specrt::native {

std::shared_ptr<Model> open_tensorrt(const Bundle& bundle, const ModelRecord& model) {
  using namespace tensorrt;
  const std::string path = bundle.file(model.engine);
  EngineRecord record = read_engine_record(bundle.file(beside(model.engine, "engine.json")));
  check_supported(path, record, bundle.manifest.batch);
  const Gpu gpu = find_gpu();
  const std::string differs = difference(record, library(), gpu);
  if (!differs.empty()) throw Failure(SPECRT_ENGINE, path + " does not run here: " + differs);
  const OnDevice here;
  auto shared = std::make_shared<SharedPlan>();
  shared->record = std::move(record);
  shared->geometry = model.geometry;
  shared->max_length = static_cast<std::size_t>(bundle.manifest.max_length);
  shared->max_width = bundle.manifest.max_width();
  shared->integrated = gpu.integrated;
  shared->plan = std::make_unique<CompiledPlan>(path, shared->record);
  check_plan(*shared->plan, shared->record, shared->geometry, shared->max_length);
  return std::make_shared<TensorRtModel>(std::move(shared));
}

}  // namespace specrt::native
