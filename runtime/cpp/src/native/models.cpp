#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>

#include "native/bundle.hpp"
#include "native/machine.hpp"
#include "native/ort_engine.hpp"
#ifdef SPECRT_WITH_TENSORRT
#include "native/tensorrt.hpp"
#endif

namespace specrt::native {

namespace {

constexpr std::uint64_t kSmallBytes = 64 << 20;

class OrtModel : public Model {
 public:
  OrtModel(std::shared_ptr<const SharedSession> session, const OrtSettings& settings)
      : session_(std::move(session)), settings_(settings) {
    engine();  // says now where graph and manifest do not belong together
  }

  std::unique_ptr<Engine> engine() override {
    if (settings_.batch == 1) return std::make_unique<OrtEngine>(session_, settings_);
    return std::make_unique<PackedEngine>(session_, settings_);
  }

 private:
  const std::shared_ptr<const SharedSession> session_;
  const OrtSettings settings_;
};

// The threads of a pool of its own: one for an engine as small as a draft.
int own_threads(const std::string& path, int threads) {
  const std::string folder = path.substr(0, path.rfind('/'));
  std::uint64_t bytes = 0;
  if (DIR* opened = opendir(folder.c_str())) {
    while (const dirent* entry = readdir(opened)) {
      struct stat found;
      const bool is_file =
          stat((folder + "/" + entry->d_name).c_str(), &found) == 0 && S_ISREG(found.st_mode);
      if (is_file) bytes += static_cast<std::uint64_t>(found.st_size);
    }
    closedir(opened);
  }
  return bytes < kSmallBytes ? 1 : threads;
}

// Bytes of main memory that a model takes with full KV buffers, as a double: a manifest may say
// anything.
double host_bytes(const Manifest& manifest, const ModelRecord& model) {
  if (model.backend != "ort-cpu") return 0;
  const Geometry& g = model.geometry;
  return static_cast<double>(model.weight_bytes) + 2.0 * g.layers * manifest.batch * g.kv_heads *
                                                       manifest.max_length * g.head_dim *
                                                       model.kv_item_bytes;
}

std::string no_room(const Manifest& manifest, std::uint64_t asked) {
  const std::uint64_t most = asked > 0 ? asked : available_bytes();
  if (!manifest.draft || most == 0) return "";
  const double both = host_bytes(manifest, manifest.target) + host_bytes(manifest, *manifest.draft);
  if (both <= static_cast<double>(most)) return "";
  char mebibytes[64];
  std::snprintf(mebibytes, sizeof mebibytes, "%.0f", both / (1 << 20));
  return std::string("the draft model is not opened: target and draft take ") + mebibytes +
         " MiB with their KV buffers full, and " + std::to_string(most >> 20) + " MiB may be used";
}

std::shared_ptr<Model> open_model(const Bundle& bundle, const ModelRecord& model,
                                  const OpenOptions& options, int threads) {
  if (model.backend == "ort-cpu")
    return open_ort(bundle, model, OrtLibrary::load(options.onnxruntime), threads);
  if (model.backend == "tensorrt" || model.backend == "tensorrt-rtx") {
#ifdef SPECRT_WITH_TENSORRT
    return open_tensorrt(bundle, model);
#else
    throw Failure(SPECRT_UNSUPPORTED,
                  "the bundle's backend is " + model.backend +
                      ", and this library was built without TensorRT; build it with "
                      "-DTENSORRT_ROOT=FOLDER of the SDK, or use the hosted implementation");
#endif
  }
  if (model.backend == "ort-cuda")
    throw Failure(SPECRT_UNSUPPORTED,
                  "the bundle's backend is ort-cuda, which this library cannot open; use the "
                  "hosted implementation (-DSPECRT_IMPLEMENTATION=hosted)");
  throw Failure(SPECRT_ENGINE, "backend '" + model.backend +
                                   "' is unknown to this version of specrt; known: ort-cpu, "
                                   "tensorrt, tensorrt-rtx");
}

}  // namespace

std::shared_ptr<Model> open_ort(const Bundle& bundle, const ModelRecord& model,
                                const OrtLibrary& library, int threads) {
  const Manifest& manifest = bundle.manifest;
  const bool is_target = &model == &manifest.target;
  OrtSettings settings;
  settings.geometry = model.geometry;
  settings.batch = manifest.batch;
  settings.max_length = static_cast<std::size_t>(manifest.max_length);
  settings.max_width = manifest.max_width();
  settings.spare = is_target && model.quantized;
  settings.even = settings.spare && (!bundle.tuning || bundle.tuning->even);
  const std::string path = bundle.file(model.engine);
  auto session = std::make_shared<const SharedSession>(library, path, own_threads(path, threads),
                                                       model.half_stored);
  return std::make_shared<OrtModel>(std::move(session), settings);
}

Models open_models(const Bundle& bundle, const OpenOptions& options, int threads) {
  const Manifest& manifest = bundle.manifest;
  Models models;
  models.absent = no_room(manifest, options.memory_bytes);
  const bool alone = !manifest.draft || manifest.draft->backend == manifest.target.backend;
  // The first bundle decides: the library makes one environment for the process.
  if (options.owns_process && alone && manifest.target.backend == "ort-cpu" && threads > 1)
    OrtLibrary::load(options.onnxruntime).environment(threads);
  models.target = open_model(bundle, manifest.target, options, threads);
  if (manifest.draft && models.absent.empty())
    models.draft = open_model(bundle, *manifest.draft, options, threads);
  return models;
}

std::string engine_library() {
  if (const OrtLibrary* library = OrtLibrary::loaded()) return "ONNX Runtime " + library->version();
#ifdef SPECRT_WITH_TENSORRT
  return tensorrt_library();
#else
  return "";
#endif
}

}  // namespace specrt::native
