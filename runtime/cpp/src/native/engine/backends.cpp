#include "native/engine/backends.hpp"

#include <algorithm>

#include "native/engine/ort_library.hpp"
#include "native/machine.hpp"
#include "native/text/json.hpp"

namespace specrt::native {

namespace {

// Bytes of main memory that a model takes with full KV buffers.
double host_bytes(const Manifest& manifest, const ModelRecord& model) {
  if (model.backend != "ort-cpu") return 0;
  return static_cast<double>(model.weight_bytes) + kv_bytes(manifest, model, manifest.batch);
}

// A number of bytes in GB or MB.
std::string size(double bytes) {
  return bytes >= 1e9 ? decimal(bytes / 1e9, 2) + " GB" : decimal(bytes / 1e6, 1) + " MB";
}

std::string no_room(const Manifest& manifest, std::uint64_t limit) {
  const std::uint64_t most = limit > 0 ? limit : available_bytes();
  if (!manifest.draft || most == 0) return "";
  const double both = host_bytes(manifest, manifest.target) + host_bytes(manifest, *manifest.draft);
  if (both <= static_cast<double>(most)) return "";
  return "the draft model is not opened: target and draft take " + size(both) +
         " with their KV buffers full, and " + size(static_cast<double>(most)) + " may be used";
}

std::shared_ptr<Model> open_model(const Bundle& bundle, const ModelRecord& model,
                                  const OpenOptions& options, int threads) {
  if (model.backend == "ort-cpu")
    return open_ort(bundle, model, OrtLibrary::load(options.onnxruntime), threads);
  if (model.backend == "tensorrt" || model.backend == "tensorrt-rtx") {
    for (const LayerMemory& one : model.geometry.memories)
      if (one.kind == LayerMemory::Kind::recurrent)
        throw Failure(SPECRT_UNSUPPORTED,
                      "layers of the bundle have recurrent states, which this library runs with "
                      "ort-cpu alone; use the hosted implementation "
                      "(-DSPECRT_IMPLEMENTATION=hosted)");
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

double kv_bytes(const Manifest& manifest, const ModelRecord& model, int rows) {
  const auto length = static_cast<std::size_t>(manifest.max_length);
  const bool is_model = model.kind.empty();
  const std::size_t ring_width = is_model && model.backend == "ort-cpu" ? manifest.max_width() : 0;
  double items = 0;
  for (const MemoryBuffer& one : model.geometry.buffers()) {
    const auto positions = static_cast<double>(one.positions(length, ring_width));
    items += positions * one.heads * one.width;
  }
  const double features = is_model ? 4.0 * manifest.max_length * model.features : 0;
  return rows * (features + items * model.kv_item_bytes);
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
