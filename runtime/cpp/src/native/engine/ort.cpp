#include "native/engine/ort.hpp"

#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <set>
#include <stdexcept>

#include "native/bundle/manifest.hpp"
#include "native/engine/backends.hpp"
#include "native/engine/external_data.hpp"

namespace specrt::native {

namespace {

constexpr auto kInt64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
constexpr auto kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;

std::int64_t size_of(std::size_t count) { return static_cast<std::int64_t>(count); }

std::string listed(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const std::int64_t size : shape)
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

std::size_t items_of(const std::vector<std::int64_t>& shape) {
  constexpr double kMost = 1e15;  // more than any machine has, and far from overflow
  double items = 1;
  for (const std::int64_t size : shape) items *= static_cast<double>(size);
  return static_cast<std::size_t>(std::min(items, kMost));
}

}  // namespace

Buffer::Buffer(std::size_t items, std::size_t item_bytes)
    : memory_(std::calloc(std::max<std::size_t>(items, 1), item_bytes), &std::free) {
  if (memory_ == nullptr)
    throw Failure(SPECRT_ENGINE, "no memory for a buffer of " + std::to_string(items) +
                                     " items of " + std::to_string(item_bytes) +
                                     " bytes; build the bundle with a shorter max_length");
}

OrtEngine::OrtEngine(std::shared_ptr<const SharedSession> session, const OrtSettings& settings)
    : session_(std::move(session)),
      settings_(settings),
      tokens_(settings.max_width + 2, sizeof(Token)),
      rows_(settings.max_width + 2, sizeof(Token)),
      start_(static_cast<std::size_t>(settings.batch), sizeof(Token)),
      argmax_(settings.max_width + 2, sizeof(Token)),
      logits_(settings.max_width + 2,
              sizeof(float) * static_cast<std::size_t>(settings.geometry.vocab_size)),
      confidence_(settings.max_width + 2, sizeof(float)),
      is_confident_(session_->has_output("confidence")) {
  if (settings.batch == 1) allocate("");
}

void OrtEngine::allocate(const std::string& suffix) {
  const Geometry& g = settings_.geometry;
  const std::vector<std::int64_t> shape = {1, g.kv_heads, size_of(settings_.max_length),
                                           g.head_dim};
  for (int layer = 0; layer < g.layers; ++layer) {
    for (const char* kind : {"key.", "value."}) {
      const std::string name = kind + std::to_string(layer) + suffix;
      const auto entry = session_->inputs().find(name);
      if (entry == session_->inputs().end())
        throw Failure(SPECRT_ENGINE, "the engine has no input '" + name + "', expected for a " +
                                         "model of " + std::to_string(g.layers) +
                                         " layers; the bundle does not match its manifest: build "
                                         "it again");
      const OrtPort& port = entry->second;
      if (port.shape != shape || ort_item_bytes(port.type) == 0 || port.type == kInt64)
        throw Failure(SPECRT_ENGINE, "the engine's " + name + " has shape " + listed(port.shape) +
                                         ", and the manifest says " + listed(shape) +
                                         "; they do not belong together: build the bundle again");
      caches_.push_back({name, port, Buffer(items_of(shape), ort_item_bytes(port.type))});
    }
  }
}

void OrtEngine::check(std::size_t width, std::size_t start, std::size_t rows) const {
  if (width == 0 || width > max_width())
    throw Failure(SPECRT_ENGINE, "a pass of " + std::to_string(width) +
                                     " tokens was asked of an engine built for widths 1 to " +
                                     std::to_string(max_width()) +
                                     "; rebuild with a larger prefill or gamma");
  if (start > max_length() || width > max_length() - start)
    throw Failure(SPECRT_ENGINE, "a pass would write positions " + std::to_string(start) + " to " +
                                     std::to_string(start + width - 1) +
                                     " of a KV buffer that has 0 to " +
                                     std::to_string(max_length() - 1));
  if (rows > width)
    throw Failure(SPECRT_ENGINE, std::to_string(rows) +
                                     " positions were to be scored in a pass of " +
                                     std::to_string(width) + " tokens; expected up to as many");
}

OrtEngine::Extent OrtEngine::extent(std::size_t width, std::size_t rows) const {
  const bool pad =
      settings_.pad_to_even ? width % 2 != 0 : settings_.pad_single_token && width == 1;
  return {width, rows, width + pad, rows + (settings_.pad_to_even && rows % 2 != 0)};
}

std::vector<std::int64_t> OrtEngine::scored_shape(const Extent& extent) const {
  return {1, size_of(extent.scored)};
}

void OrtEngine::bind_cache(Binding& binding, const std::string& name, void* memory) const {
  const OrtPort& port = session_->inputs().at(name);
  binding.input(name, {memory, port.type, port.shape});
  binding.output("present_" + name, {memory, port.type, port.shape});
}

void OrtEngine::bind_more(Binding& binding, const Extent&) {
  for (const Cache& cache : caches_) bind_cache(binding, cache.name, cache.memory.get());
}

Binding& OrtEngine::bound(const Extent& extent) {
  std::unique_ptr<Binding>& known = passes_[{extent.width, extent.rows}];
  if (known != nullptr) return *known;
  auto binding = std::make_unique<Binding>(*session_);
  binding->input("input_ids", {tokens_.get(), kInt64, {1, size_of(extent.tokens)}});
  binding->input("start", {start_.get(), kInt64, {settings_.batch}});
  binding->input("rows", {rows_.get(), kInt64, {size_of(extent.scored)}});
  std::vector<std::int64_t> shape = scored_shape(extent);
  binding->output("argmax", {argmax_.get(), kInt64, shape});
  if (is_confident_) binding->output("confidence", {confidence_.get(), kFloat, shape});
  shape.push_back(settings_.geometry.vocab_size);
  binding->output("logits", {logits_.get(), kFloat, shape});
  bind_more(*binding, extent);
  known = std::move(binding);
  return *known;
}

void OrtEngine::fill(const Extent& extent, std::size_t start) {
  *start_.as<Token>() = static_cast<Token>(start);
  Token* rows = rows_.as<Token>();
  for (std::size_t i = 0; i < extent.rows; ++i) rows[i] = size_of(extent.width - extent.rows + i);
  std::fill(rows + extent.rows, rows + extent.scored, 0);
}

Output OrtEngine::forward(const Token* tokens, std::size_t width, std::size_t start,
                          std::size_t rows) {
  check(width, start, rows);
  const Extent its = extent(width, rows == 0 ? width : rows);
  Binding& binding = bound(its);
  fill(its, start);
  Token* fed = tokens_.as<Token>();
  std::copy(tokens, tokens + width, fed);
  std::fill(fed + width, fed + its.tokens, 0);
  binding.run(width);
  const auto vocabulary = static_cast<std::size_t>(settings_.geometry.vocab_size);
  const float* confidence = is_confident_ ? confidence_.as<float>() : nullptr;
  return {argmax_.as<Token>(), logits_.as<float>(), confidence, its.rows, vocabulary};
}

PackedEngine::PackedEngine(std::shared_ptr<const SharedSession> session,
                           const OrtSettings& settings)
    : OrtEngine(std::move(session), settings),
      has_positions_(session_->inputs().count("positions") > 0),
      positions_(settings.max_width + 2, sizeof(Token)),
      widths_(static_cast<std::size_t>(settings.batch), sizeof(Token)),
      spread_(settings.max_width + 2 + 2 * static_cast<std::size_t>(settings.batch), sizeof(Token)),
      kept_(settings.max_width + 2, sizeof(Token)) {
  allocate(".0");
  const auto& inputs = session_->inputs();
  const auto has = [&](int row) { return inputs.count("key.0." + std::to_string(row)) > 0; };
  for (const Cache& cache : caches_) {
    const std::string name = cache.name.substr(0, cache.name.size() - 1);
    for (int row = 1; row < settings_.batch; ++row) {
      const auto entry = inputs.find(name + std::to_string(row));
      if (entry == inputs.end() || entry->second.shape != cache.port.shape ||
          entry->second.type != caches_[0].port.type || has(settings_.batch))
        throw Failure(SPECRT_ENGINE,
                      "the engine does not have the buffers '" + name + "' of " +
                          std::to_string(settings_.batch) +
                          " rows that its manifest describes: it was built by an earlier version, "
                          "or belongs to another bundle. Build the bundle again");
    }
  }
  const std::vector<std::int64_t>& shape = caches_[0].port.shape;
  std::size_t items = 1;
  for (const std::int64_t size : shape) items *= static_cast<std::size_t>(size);
  scratch_kv_ = std::make_unique<Buffer>(items, ort_item_bytes(caches_[0].port.type));
}

OrtEngine::Extent PackedEngine::extent(std::size_t width, std::size_t rows) const {
  const bool pad_to_even = settings_.pad_to_even;
  std::size_t tokens = std::max(width, places());
  tokens += pad_to_even && tokens % 2 != 0;
  return {width, rows, tokens, rows + (pad_to_even && rows % 2 != 0)};
}

std::vector<std::int64_t> PackedEngine::scored_shape(const Extent& extent) const {
  return {1, size_of(extent.scored)};
}

void PackedEngine::bind_more(Binding& binding, const Extent& extent) {
  const auto others = static_cast<std::size_t>(settings_.batch - 1);
  const std::size_t attended = std::max(extent.width, places()) + others * places();
  const std::int64_t tokens = size_of(extent.tokens);
  binding.input("widths", {widths_.get(), kInt64, {settings_.batch}});
  binding.input("spread", {spread_.get(), kInt64, {size_of(attended)}});
  binding.input("kept", {kept_.get(), kInt64, {tokens}});
  if (has_positions_) binding.input("positions", {positions_.get(), kInt64, {1, tokens}});
  for (const Cache& cache : caches_) {
    const std::string name = cache.name.substr(0, cache.name.size() - 1);
    bind_cache(binding, cache.name, cache.memory.get());
    for (int row = 1; row < settings_.batch; ++row)
      bind_cache(binding, name + std::to_string(row), scratch_kv_->get());
  }
}

void PackedEngine::fill(const Extent& extent, std::size_t start) {
  OrtEngine::fill(extent, start);
  const std::size_t own = std::max(extent.width, places());
  const auto batch = static_cast<std::size_t>(settings_.batch);
  Token* widths = widths_.as<Token>();
  std::fill(widths, widths + batch, size_of(places()));
  widths[0] = size_of(own);
  // Places beyond a row's tokens read its last one again, those of other rows any.
  Token* spread = spread_.as<Token>();
  std::fill(spread, spread + own + (batch - 1) * places(), 0);
  for (std::size_t i = 0; i < own; ++i) spread[i] = size_of(std::min(i, extent.width - 1));
  Token* kept = kept_.as<Token>();
  Token* positions = positions_.as<Token>();
  for (std::size_t i = 0; i < extent.tokens; ++i) {
    const bool fed = i < extent.width;
    kept[i] = fed ? size_of(i) : 0;
    positions[i] = fed ? size_of(start + i) : 0;
  }
}

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
      struct stat info;
      const bool is_file =
          stat((folder + "/" + entry->d_name).c_str(), &info) == 0 && S_ISREG(info.st_mode);
      if (is_file) bytes += static_cast<std::uint64_t>(info.st_size);
    }
    closedir(opened);
  }
  return bytes < kSmallBytes ? 1 : threads;
}

// Refuse a graph that takes tensors from a file that the manifest does not list: what an engine
// library reads by itself is hashed, too, and inside of the bundle.
void check_external_data(const Bundle& bundle, const std::string& engine) {
  constexpr std::uint64_t kMostBytes = std::uint64_t{2} << 30;  // protobuf takes no more
  const std::string path = bundle.file(engine);
  const std::string folder = engine.substr(0, engine.rfind('/') + 1);
  std::set<std::string> locations;
  try {
    locations = external_data(read_text(path, kMostBytes));
  } catch (const std::runtime_error& error) {
    throw Failure(SPECRT_BUNDLE,
                  path + " cannot be read (" + error.what() + "); build the bundle again");
  }
  for (const std::string& location : locations) bundle.file(folder + location);
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
  settings.pad_single_token = is_target && model.quantized;
  settings.pad_to_even =
      settings.pad_single_token && (!bundle.tuning || bundle.tuning->pad_to_even);
  const std::string path = bundle.file(model.engine);
  check_external_data(bundle, model.engine);
  auto session = std::make_shared<const SharedSession>(library, path, own_threads(path, threads),
                                                       model.half_stored);
  return std::make_shared<OrtModel>(std::move(session), settings);
}

}  // namespace specrt::native
