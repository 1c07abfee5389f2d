// ONNX Runtime with the CPU kernels: bindings made once per width, KV buffers updated in place; see
// specrt.engine.ort.ort_engine.
#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kernels/kernels.hpp"
#include "native/bundle/bundle.hpp"
#include "native/bundle/manifest.hpp"
#include "native/engine/backends.hpp"
#include "native/engine/external_data.hpp"
#include "native/engine/head_engine.hpp"
#include "native/engine/ort_library.hpp"

namespace specrt::native {

namespace {

constexpr auto kInt64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
constexpr auto kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
constexpr std::size_t kMostBindings = 64;

using Shape = std::vector<std::int64_t>;

std::int64_t size_of(std::size_t count) { return static_cast<std::int64_t>(count); }

std::string listed(const Shape& shape) {
  std::string text = "[";
  for (const std::int64_t size : shape)
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

std::size_t items_of(const Shape& shape) {
  constexpr double kMost = 1e15;  // more than any machine has, and far from overflow
  double items = 1;
  for (const std::int64_t size : shape) items *= static_cast<double>(size);
  return static_cast<std::size_t>(std::min(items, kMost));
}

// Zeroed memory, whose pages cost nothing until they are written. It begins with a line of a cache:
// a vector that lies in two lines is read twice, and attention takes 1.3 times as long.
class Buffer {
 public:
  Buffer(std::size_t items, std::size_t item_bytes)
      : memory_(std::calloc(items + kLine / item_bytes + 1, item_bytes), &std::free) {
    if (memory_ == nullptr)
      throw Failure(SPECRT_MEMORY,
                    "not enough memory for a buffer of " + std::to_string(items) + " items of " +
                        std::to_string(item_bytes) +
                        " bytes; free some, or build the bundle with a shorter max_length");
    const auto begin = reinterpret_cast<std::uintptr_t>(memory_.get());
    aligned_ = static_cast<char*>(memory_.get()) + (kLine - begin % kLine) % kLine;
  }
  void* get() const { return aligned_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(get());
  }

 private:
  static constexpr std::size_t kLine = 64;

  std::unique_ptr<void, decltype(&std::free)> memory_;
  void* aligned_;
};

// What an engine is besides its graph.
struct OrtSettings {
  Geometry geometry;
  int batch = 1;
  std::size_t max_length = 0;
  std::size_t max_width = 0;
  bool head = false;
  std::size_t features = 0;           // width of what a target leaves and a head reads; 0 for none
  std::vector<std::int32_t> entries;  // ids that a trimmed draft scores; empty where it scores all

  std::size_t vocabulary() const { return static_cast<std::size_t>(geometry.vocab_size); }
  std::size_t scored() const { return entries.empty() ? vocabulary() : entries.size(); }
};

// The scores of a draft that scores some entries of the vocabulary, as if it scored all: minus
// infinity for the others.
class TrimmedScores final : public DeferredScores {
 public:
  TrimmedScores(const OrtSettings& settings, const float* scored)
      : settings_(settings), scored_(scored) {}

  void expect(std::size_t rows) { rows_ = rows; }
  float* read() override {
    const std::size_t vocabulary = settings_.vocabulary();
    if (scores_.size() < rows_ * vocabulary)
      scores_.assign(rows_ * vocabulary, -std::numeric_limits<float>::infinity());
    const float* from = scored_;
    for (float* row = scores_.data(); rows_ > 0; --rows_, row += vocabulary)
      for (const std::int32_t entry : settings_.entries) row[entry] = *from++;
    return scores_.data();  // of no rows the second time: they are there
  }

 private:
  const OrtSettings& settings_;
  const float* scored_;
  std::size_t rows_ = 0;  // still to be made
  std::vector<float> scores_;
};

// The graph has KV buffers of `batch` rows. Every engine has its own and feeds the first row; those
// of the others are never written, and take no memory.
class OrtEngine : public Engine {
 public:
  OrtEngine(std::shared_ptr<const SharedSession> session, const OrtSettings& settings)
      : session_(std::move(session)),
        settings_(settings),
        tokens_(settings.max_width, sizeof(Token)),
        slots_(settings.max_width, sizeof(Token)),
        positions_(settings.max_width, sizeof(Token)),
        rows_(settings.max_width, sizeof(Token)),
        argmax_(settings.max_width, sizeof(Token)),
        logits_(settings.max_width, sizeof(float) * settings.scored()),
        confidence_(settings.max_width, sizeof(float)),
        is_confident_(session_->outputs().count("confidence") > 0),
        trimmed_(settings_, logits_.as<float>()),
        width_(settings.features),
        features_(settings.head ? 0 : settings.max_length * width_, sizeof(float)),
        passed_(settings.max_width * width_, sizeof(float)),
        states_(settings.head ? settings.max_width * width_ : 0, sizeof(float)) {
    allocate();
  }

  Output forward(const Token* tokens, std::size_t width, std::size_t start,
                 std::size_t rows) override {
    check(width, start, rows);
    note(width, start);
    const std::size_t scored = rows == 0 ? width : rows;
    Binding& binding = bound(width, scored);
    std::copy(tokens, tokens + width, tokens_.as<Token>());
    for (std::size_t i = 0; i < width; ++i) positions_.as<Token>()[i] = size_of(start + i);
    for (std::size_t i = 0; i < scored; ++i) rows_.as<Token>()[i] = size_of(width - scored + i);
    binding.run(width);
    if (features() != nullptr)
      std::copy_n(passed_.as<float>(), width * width_, features_.as<float>() + start * width_);
    const float* confidence = is_confident_ ? confidence_.as<float>() : nullptr;
    Output output{argmax_.as<Token>(), logits_.as<float>(), confidence, scored,
                  settings_.vocabulary()};
    if (settings_.head) output.state = states_.as<float>();
    if (!settings_.entries.empty()) {
      trimmed_.expect(scored);
      output.logits = nullptr;
      output.late = &trimmed_;
    }
    return output;
  }
  const float* features() const override {
    return settings_.head || width_ == 0 ? nullptr : features_.as<float>();
  }
  float* hidden() override { return settings_.head ? passed_.as<float>() : nullptr; }
  LentBuffer lent(const std::string& name) const override {
    for (const Cache& cache : caches_)
      if (cache.name == name) return {cache.memory.get(), cache.shape};
    return {};
  }
  // Read buffers of a target in place.
  void borrow(const Engine& target);
  std::size_t rewind() const override {
    const std::size_t least = back_ > 0 && written_ > back_ ? written_ - back_ : 0;
    return bases_.empty() ? least : std::max(least, held());
  }
  const Geometry& geometry() const override { return settings_.geometry; }
  std::size_t max_length() const override { return settings_.max_length; }
  std::size_t max_width() const override { return settings_.max_width; }

 private:
  struct Cache {
    std::string name;
    Shape shape;
    Buffer memory;
  };

  // Up to where the states hold the text; the first layer is as good as the others.
  std::size_t held() const {
    const std::int64_t base = *bases_.front().memory.as<std::int64_t>();
    return base < 0 ? max_length() : static_cast<std::size_t>(base);
  }
  void allocate();
  void check_shape(const std::string& name, const Shape& shape) const;
  void check_ports() const;
  void check(std::size_t width, std::size_t start, std::size_t rows) const;
  void note(std::size_t width, std::size_t start);
  Binding& bound(std::size_t width, std::size_t scored);

  const std::shared_ptr<const SharedSession> session_;
  const OrtSettings settings_;
  std::vector<Cache> caches_;
  std::vector<Cache> bases_;  // of the states of recurrent layers: what they hold of the text
  std::map<std::string, LentBuffer> borrowed_;
  std::size_t back_ = 0;     // positions before its end that a text may go on from; 0: all of them
  std::size_t written_ = 0;  // the end of what was written since the text began
  Buffer tokens_;
  Buffer slots_;
  Buffer positions_;
  Buffer rows_;
  Buffer argmax_;
  Buffer logits_;
  Buffer confidence_;
  const bool is_confident_;
  TrimmedScores trimmed_;
  const std::size_t width_;  // of features
  Buffer features_;          // of all positions, where a target leaves them
  Buffer passed_;            // of the tokens of a pass: what a target leaves, or a head reads
  Buffer states_;            // of the scored tokens of a pass, where a head leaves them
  std::map<std::pair<std::size_t, std::size_t>, std::unique_ptr<Binding>> bindings_;
};

void OrtEngine::allocate() {
  check_ports();
  const std::int64_t tile = size_of(kernels::kTile);
  const auto tiles = [&](std::int64_t count) { return (count + tile - 1) / tile; };
  const std::size_t width = settings_.head ? 0 : settings_.max_width;  // a head keeps all
  for (const MemoryBuffer& one : settings_.geometry.buffers()) {
    const std::size_t positions = one.positions(settings_.max_length, width);
    const std::int64_t groups = tiles(size_of(positions));
    const bool is_key = one.name.rfind("key.", 0) == 0;
    const Shape shape =
        one.fixed > 0 ? Shape{settings_.batch, one.heads, one.fixed, tiles(one.width) * tile}
        : is_key      ? Shape{settings_.batch, one.heads, groups, one.width, tile}
                      : Shape{settings_.batch, one.heads, groups * tile, tiles(one.width) * tile};
    check_shape(one.name, shape);
    caches_.push_back({one.name, shape, Buffer(items_of(shape), sizeof(float))});
    if (one.fixed > 0)
      bases_.push_back({"base" + one.name.substr(one.name.find('.')), Shape{settings_.batch},
                        Buffer(static_cast<std::size_t>(settings_.batch), sizeof(std::int64_t))});
    if (one.fixed > 0 || one.ring > 0 || positions >= settings_.max_length) continue;
    const std::size_t kept = positions - static_cast<std::size_t>(one.seen) + 1;
    back_ = back_ == 0 ? kept : std::min(back_, kept);
  }
  // A head may see one key more than its target, further back.
  if (back_ > 0 && features() != nullptr) --back_;
}

void OrtEngine::check_shape(const std::string& name, const Shape& shape) const {
  const auto entry = session_->inputs().find(name);
  const OrtPort port = entry == session_->inputs().end() ? OrtPort{} : entry->second;
  if (port.shape == shape && port.type == kFloat) return;
  throw Failure(SPECRT_ENGINE, "the engine's " + name + " has shape " + listed(port.shape) +
                                   ", and the manifest says " + listed(shape) +
                                   "; they do not belong together: build the bundle again");
}

void OrtEngine::borrow(const Engine& target) {
  for (const auto& [name, own] : settings_.geometry.lent()) {
    const LentBuffer lent = target.lent(own);
    if (lent.data == nullptr)
      throw Failure(SPECRT_ENGINE, "the draft is a head that reads " + own +
                                       " of its target, which has no such buffer here; build both "
                                       "in one bundle of `ort-cpu`");
    check_shape(name, lent.shape);
    borrowed_[name] = lent;
  }
}

void OrtEngine::note(std::size_t width, std::size_t start) {
  if (back_ == 0 && bases_.empty()) return;
  if (start > 0 && start < rewind())
    throw Failure(SPECRT_ENGINE, "the text was to go on from position " + std::to_string(start) +
                                     "; its layers remember enough from position " +
                                     std::to_string(rewind()) +
                                     " on, or from 0 with the text read again");
  written_ = start == 0 ? width : std::max(written_, start + width);
}

// Refuse a graph with a port for heads, or a width of one, that the manifest does not say.
void OrtEngine::check_ports() const {
  const auto check = [](const std::map<std::string, OrtPort>& ports, const std::string& name,
                        std::size_t expected) {
    const auto entry = ports.find(name);
    const bool is_there = entry != ports.end();
    const OrtPort port = is_there ? entry->second : OrtPort{};
    const bool fits =
        !port.shape.empty() && port.type == kFloat && port.shape.back() == size_of(expected);
    if (expected > 0 ? fits : !is_there) return;
    throw Failure(SPECRT_ENGINE, "the engine's " + name + " has shape " + listed(port.shape) +
                                     ", and the manifest says a width of " +
                                     std::to_string(expected) +
                                     "; they do not belong together: build the bundle again");
  };
  const std::size_t read = settings_.head ? width_ : 0;
  check(session_->inputs(), "hidden", read);
  check(session_->outputs(), "state", read);
  check(session_->outputs(), "feature", width_ - read);
  check(session_->outputs(), "logits", settings_.scored());
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

Binding& OrtEngine::bound(std::size_t width, std::size_t scored) {
  const std::pair<std::size_t, std::size_t> key{width, scored};
  const auto known = bindings_.find(key);
  if (known != bindings_.end()) return *known->second;
  if (bindings_.size() >= kMostBindings) bindings_.clear();
  auto binding = std::make_unique<Binding>(*session_);
  const Shape tokens = {size_of(width)};
  Shape scores = {1, size_of(scored)};
  binding->input("input_ids", {tokens_.get(), kInt64, {1, size_of(width)}});
  binding->input("slots", {slots_.get(), kInt64, tokens});
  binding->input("positions", {positions_.get(), kInt64, tokens});
  binding->input("rows", {rows_.get(), kInt64, {size_of(scored)}});
  for (const Cache& cache : caches_) {
    binding->input(cache.name, {cache.memory.get(), kFloat, cache.shape});
    binding->output("present_" + cache.name, {cache.memory.get(), kFloat, cache.shape});
  }
  for (const auto& [name, lent] : borrowed_) binding->input(name, {lent.data, kFloat, lent.shape});
  for (const Cache& base : bases_) {
    binding->input(base.name, {base.memory.get(), kInt64, base.shape});
    binding->output("present_" + base.name, {base.memory.get(), kInt64, base.shape});
  }
  binding->output("argmax", {argmax_.get(), kInt64, scores});
  if (is_confident_) binding->output("confidence", {confidence_.get(), kFloat, scores});
  if (width_ > 0) {
    const Binding::Place all = {passed_.get(), kFloat, {1, size_of(width), size_of(width_)}};
    const Binding::Place last = {states_.get(), kFloat, {1, size_of(scored), size_of(width_)}};
    if (settings_.head) binding->input("hidden", all);
    if (settings_.head) binding->output("state", last);
    if (!settings_.head) binding->output("feature", all);
  }
  scores.push_back(size_of(settings_.scored()));
  binding->output("logits", {logits_.get(), kFloat, scores});
  return *(bindings_[key] = std::move(binding));
}

constexpr std::uint64_t kSmallBytes = 64 << 20;

class OrtModel : public Model {
 public:
  OrtModel(std::shared_ptr<const SharedSession> session, const OrtSettings& settings)
      : session_(std::move(session)), settings_(settings) {
    engine();  // says now where graph and manifest do not belong together
  }

  std::unique_ptr<Engine> engine() override {
    return std::make_unique<OrtEngine>(session_, settings_);
  }
  std::unique_ptr<Engine> engine_beside(const Engine& target) override {
    if (!settings_.head) return engine();
    if (target.features() == nullptr)
      throw Failure(SPECRT_ENGINE,
                    "the draft is a head, and its target leaves no features here; build both in "
                    "one bundle of `ort-cpu`");
    auto head = std::make_unique<OrtEngine>(session_, settings_);
    head->borrow(target);
    return std::make_unique<HeadEngine>(std::move(head), target, settings_.features);
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

// The ids that a trimmed draft scores, rising; none where it scores all.
std::vector<std::int32_t> scored_entries(const Bundle& bundle, const std::string& name) {
  constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 30;
  if (name.empty()) return {};
  const std::string path = bundle.file(name);
  const std::int64_t known = bundle.manifest.target.geometry.vocab_size;
  std::string data;
  try {
    data = read_text(path, kMostBytes);
  } catch (const std::runtime_error& error) {
    throw Failure(SPECRT_BUNDLE,
                  path + " cannot be read (" + error.what() + "); build the bundle again");
  }
  std::vector<std::int32_t> entries(data.size() / sizeof(std::int32_t));
  bool sound = !entries.empty() && data.size() % sizeof(std::int32_t) == 0;
  std::int64_t before = -1;
  for (std::size_t i = 0; i < entries.size() && sound; ++i) {
    std::uint32_t bits = 0;
    for (std::size_t byte = 4; byte-- > 0;)
      bits = bits << 8 | static_cast<unsigned char>(data[4 * i + byte]);
    entries[i] = static_cast<std::int32_t>(bits);
    sound = before < entries[i] && entries[i] < known;
    before = entries[i];
  }
  if (sound) return entries;
  throw Failure(SPECRT_BUNDLE, path + " has no rising ids from 0 to " + std::to_string(known - 1) +
                                   "; build the bundle again with `specrt build RECIPE`");
}

}  // namespace

std::shared_ptr<Model> open_ort(const Bundle& bundle, const ModelRecord& model,
                                const OrtLibrary& library, int threads) {
  const Manifest& manifest = bundle.manifest;
  const std::string path = bundle.file(model.engine);
  check_external_data(bundle, model.engine);
  auto session = std::make_shared<const SharedSession>(library, path, own_threads(path, threads));
  const OrtSettings settings{model.geometry,
                             manifest.batch,
                             static_cast<std::size_t>(manifest.max_length),
                             manifest.max_width(),
                             !model.kind.empty(),
                             static_cast<std::size_t>(model.features),
                             scored_entries(bundle, model.vocab_map)};
  return std::make_shared<OrtModel>(std::move(session), settings);
}

}  // namespace specrt::native
