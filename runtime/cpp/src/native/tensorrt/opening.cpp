#include <new>

#include "failure.hpp"
#include "native/tensorrt.hpp"
#include "native/tensorrt/contract.hpp"
#include "native/tensorrt/engine.hpp"
#include "native/tensorrt/fingerprint.hpp"

namespace specrt::native {

namespace tensorrt {

namespace {

class TensorRtModel final : public Model {
 public:
  explicit TensorRtModel(std::shared_ptr<const Shared> shared) : shared_(std::move(shared)) {}
  ~TensorRtModel() override {
    const OnDevice here(std::nothrow);
    shared_.reset();
  }

  std::unique_ptr<Engine> engine() override { return std::make_unique<TensorRtEngine>(shared_); }

 private:
  std::shared_ptr<const Shared> shared_;  // the weights live as long as an engine uses them
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

std::string beside(const std::string& path, const char* name) {
  return path.substr(0, path.rfind('/') + 1) + name;
}

}  // namespace

}  // namespace tensorrt

std::shared_ptr<Model> open_tensorrt(const Bundle& bundle, const ModelRecord& model) {
  using namespace tensorrt;
  const std::string path = bundle.file(model.engine);
  EngineRecord record = read_engine_record(beside(path, "engine.json"));
  check_supported(path, record, bundle.manifest.batch);
  const Gpu gpu = find_gpu();
  const std::string differs = difference(record, library(), gpu);
  if (!differs.empty()) throw Failure(SPECRT_ENGINE, path + " does not run here: " + differs);
  const OnDevice here;
  auto shared = std::make_shared<Shared>();
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
