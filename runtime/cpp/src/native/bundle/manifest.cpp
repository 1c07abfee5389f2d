#include "native/bundle/manifest.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string_view>

#include "native/bundle/fields.hpp"

namespace specrt::native {

namespace {

constexpr int kMostRows = 64;
constexpr std::array<std::string_view, 5> kKinds = {"", "eagle3", "dflash", "mtp",
                                                    "gemma4_assistant"};

bool inside(const std::string& name) {
  if (name.empty() || name[0] == '/') return false;
  bool any = false;
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('/', begin), name.size());
    const std::string part = name.substr(begin, end - begin);
    if (part == "..") return false;
    any = any || (!part.empty() && part != ".");
    begin = end + 1;
  }
  return any;
}

void require(bool holds, const std::string& problem) {
  if (!holds) throw std::runtime_error(problem);
}

void check_files(const Record& record) {
  const Manifest& m = record.manifest;
  std::vector<std::string> listed = {m.target.engine};
  if (m.draft) listed.push_back(m.draft->engine);
  listed.push_back("tokenizer.json");
  if (m.draft && !m.draft->vocab_map.empty()) listed.push_back(m.draft->vocab_map);
  for (const std::string& name : listed)
    require(record.files.count(name) > 0, "files lacks " + shown(name) + "; expected it");
  for (const auto& [name, file] : record.files)
    require(inside(name), "files names " + shown(name) + "; expected a place inside the bundle");
}

// Refuse a kind that there is not, and what only a draft may be.
void check_kinds(const Manifest& m) {
  std::string kinds = shown(m.target.kind);
  std::string known;
  if (m.draft) kinds += ", " + shown(m.draft->kind);
  for (const std::string_view kind : kKinds)
    known += (known.empty() ? "" : ", ") + shown(std::string(kind));
  const auto is_known = [](const ModelRecord& model) {
    return std::find(kKinds.begin(), kKinds.end(), model.kind) != kKinds.end();
  };
  require(is_known(m.target) && (!m.draft || is_known(*m.draft)),
          "kind is (" + kinds + "); expected one of (" + known + ") each");
  require(m.target.kind.empty() && m.target.vocab_map.empty(),
          "the target is a head or has a vocab_map; expected a language model");
  if (m.draft && !m.draft->kind.empty())
    require(0 < m.draft->features && m.draft->features == m.target.features,
            "the head reads features of width " + std::to_string(m.draft->features) +
                ", and the target leaves " + std::to_string(m.target.features) +
                "; expected one width of both");
  const std::vector<LayerMemory>& kept = m.target.geometry.memories;
  for (const ModelRecord* model : {&m.target, m.draft ? &*m.draft : nullptr})
    for (const LayerMemory& own : model ? model->geometry.memories : std::vector<LayerMemory>()) {
      const auto owner = static_cast<std::size_t>(own.owner);
      require(
          own.kind != LayerMemory::Kind::lent || (owner < kept.size() && kept[owner].lends(own)),
          "a layer reads what no layer of the target keeps; expected one of the same sizes "
          "there");
    }
}

void check_shape(const std::string& role, const Geometry& shape) {
  require(!shape.memories.empty(),
          role + ".geometry.memories is empty; expected one for each layer");
  for (std::size_t layer = 0; layer < shape.memories.size(); layer++) {
    const LayerMemory& own = shape.memories[layer];
    const std::string name = role + ".geometry.memories[" + std::to_string(layer) + "]";
    if (own.kind == LayerMemory::Kind::attention || own.kind == LayerMemory::Kind::lent)
      require(own.kv_heads > 0 && shape.heads % own.kv_heads == 0,
              name + ".kv_heads is " + std::to_string(own.kv_heads) +
                  "; expected a divisor of heads, " + std::to_string(shape.heads));
    if (own.kind == LayerMemory::Kind::recurrent)
      require(own.kv_heads > 0 && own.key_heads > 0 && own.kv_heads % own.key_heads == 0,
              name + ".key_heads is " + std::to_string(own.key_heads) +
                  "; expected a divisor of kv_heads, " + std::to_string(own.kv_heads));
    if (own.kind == LayerMemory::Kind::conv)
      require(own.window > 0, name + ".window is 0; expected the taps of a convolution");
  }
  for (const MemoryBuffer& one : shape.buffers())
    require(one.width > 0,
            role + ".geometry.memories: " + one.name + " has no width; expected 1 or more");
}

}  // namespace

void check_manifest(const Record& record, const std::vector<std::int64_t>& gammas) {
  const Manifest& m = record.manifest;
  const auto has = [&](std::int64_t gamma) {
    return std::find(gammas.begin(), gammas.end(), gamma) != gammas.end();
  };
  require(m.batch <= kMostRows,
          "batch is " + std::to_string(m.batch) + "; expected 1 to " + std::to_string(kMostRows));
  require(has(0), "gammas is " + shown(gammas) + "; expected 0 among them");
  if (m.gamma)
    require(has(*m.gamma),
            "gamma is " + std::to_string(*m.gamma) + "; expected one of " + shown(gammas));
  const std::int64_t most = *std::max_element(gammas.begin(), gammas.end());
  const std::uint64_t width = std::max<std::uint64_t>(static_cast<std::uint64_t>(m.prefill),
                                                      static_cast<std::uint64_t>(most) + 1);
  require(width <= static_cast<std::uint64_t>(m.max_length),
          "prefill or gammas asks for passes of " + std::to_string(width) + "; expected up to " +
              std::to_string(m.max_length));
  check_kinds(m);
  const std::int64_t vocab = m.target.geometry.vocab_size;
  for (const Token end : m.eos_token_ids)
    require(end < vocab, "eos_token_ids is " + shown(m.eos_token_ids) + "; expected ids below " +
                             std::to_string(vocab));
  if (m.bos_token_id)
    require(*m.bos_token_id < vocab, "bos_token_id is " + std::to_string(*m.bos_token_id) +
                                         "; expected an id below " + std::to_string(vocab));
  check_files(record);
  check_shape("target", m.target.geometry);
  if (m.draft) check_shape("draft", m.draft->geometry);
}

std::size_t Manifest::max_width() const {
  const int most = gammas.empty() ? 0 : *std::max_element(gammas.begin(), gammas.end());
  return static_cast<std::size_t>(std::max(prefill, most + 1));
}

namespace {

// Of what is built today; bundles of formats 1 to 3 had layers of one shape.
constexpr std::int64_t kFormat = 4;
constexpr std::int64_t kMostLayers = 10'000;
constexpr std::string_view kKindsOfMemory[] = {"attention", "shared", "conv", "recurrent", "lent"};
constexpr const char* kTasks[] = {"text-generation", "text2text-generation",
                                  "automatic-speech-recognition"};
constexpr std::int64_t kMostSnapshotBytes = std::int64_t{1} << 40;
constexpr std::int64_t kMostFeatures = 1'000'000;
constexpr std::uint64_t kMostManifestBytes = 64 << 20;
constexpr char kAgain[] = "build the bundle again with `specrt build RECIPE`";

// Layers of one shape, as bundles of formats 1 to 3 have them.
std::vector<LayerMemory> read_layers(const Fields& fields) {
  const auto layers = static_cast<std::size_t>(fields.whole("layers", 1, kMostLayers));
  LayerMemory one;
  one.kv_heads = static_cast<int>(fields.count("kv_heads"));
  one.key_width = one.value_width = static_cast<int>(fields.count("head_dim"));
  const std::size_t windows = fields.wholes("windows").size();
  if (windows != layers)
    throw std::runtime_error(fields.place("windows") + " has " + std::to_string(windows) +
                             " entries; expected one for each of " + std::to_string(layers) +
                             " layers");
  return std::vector<LayerMemory>(layers, one);
}

LayerMemory read_memory(const Fields& fields, std::size_t layer,
                        const std::vector<LayerMemory>& earlier) {
  fields.only({"kind", "kv_heads", "key_width", "value_width", "window", "owner", "key_heads"});
  LayerMemory memory;
  const std::string kind = fields.text("kind");
  const auto* const known = std::find(std::begin(kKindsOfMemory), std::end(kKindsOfMemory), kind);
  if (known == std::end(kKindsOfMemory))
    throw std::runtime_error(fields.place("kind") + " is " + shown(kind) +
                             "; expected attention, shared, conv, recurrent, lent, or a newer "
                             "specrt");
  memory.kind = static_cast<LayerMemory::Kind>(known - std::begin(kKindsOfMemory));
  const auto size = [&](const char* name) {
    return fields.has(name) ? fields.whole(name, 0, kMostCount) : 0;
  };
  memory.kv_heads = static_cast<int>(size("kv_heads"));
  memory.key_width = static_cast<int>(size("key_width"));
  memory.value_width = static_cast<int>(size("value_width"));
  memory.window = static_cast<int>(size("window"));
  memory.key_heads = static_cast<int>(size("key_heads"));
  memory.owner = static_cast<int>(size("owner"));
  const auto owner = static_cast<std::size_t>(memory.owner);
  using Kind = LayerMemory::Kind;
  const auto attends = [&] {
    return owner < layer &&
           (earlier[owner].kind == Kind::attention || earlier[owner].kind == Kind::lent);
  };
  if (memory.kind == Kind::shared && !attends())
    throw std::runtime_error(fields.place("owner") + " is " + std::to_string(owner) +
                             "; expected an earlier layer that attends");
  return memory;
}

Geometry read_geometry(const Fields& fields) {
  Geometry shape;
  if (fields.has("head_dim")) {
    fields.only(
        {"layers", "heads", "kv_heads", "head_dim", "vocab_size", "max_positions", "windows"});
    shape.memories = read_layers(fields);
  } else {
    fields.only({"heads", "vocab_size", "max_positions", "layers", "memories"});
    if (fields.has("layers")) fields.whole("layers", 1, kMostLayers);
    for (const Fields& memory : fields.records("memories"))
      shape.memories.push_back(read_memory(memory, shape.memories.size(), shape.memories));
  }
  shape.heads = static_cast<int>(fields.whole("heads", 0, kMostCount));
  shape.vocab_size = static_cast<int>(fields.count("vocab_size"));
  shape.max_positions = static_cast<int>(fields.count("max_positions"));
  return shape;
}

void check_quality(const Fields& model) {
  if (!model.has("quality")) return;
  const auto quality = model.record_or_null("quality");
  if (!quality) return;
  quality->only({"kl", "top1", "tokens"});
  quality->number("kl");
  const double top1 = quality->number("top1");
  quality->count("tokens");
  if (top1 > 1) throw std::runtime_error("quality.top1 is above 1; expected a share");
}

void check_acceptance(const Fields& manifest) {
  if (!manifest.has("acceptance")) return;
  const auto acceptance = manifest.record_or_null("acceptance");
  if (!acceptance) return;
  acceptance->only({"before", "after"});
  for (const char* name : {"before", "after"})
    if (acceptance->number(name) > 1)
      throw std::runtime_error("acceptance is above 1; expected shares");
}

void check_origins(const Fields& manifest) {
  if (!manifest.has("origins")) return;
  for (const auto& [role, origin] : manifest.named("origins")) {
    origin.only({"formats", "files", "hub", "revision", "left_out"});
    origin.text("formats");
    origin.texts("files");
    for (const char* name : {"hub", "revision", "left_out"})
      if (origin.has(name)) origin.text(name);
  }
}

ModelRecord read_model(const Fields& fields, const std::string& backend) {
  fields.only({"engine",        "geometry", "model_type", "parameters", "weight_bytes",
               "kv_item_bytes", "fused",    "precision",  "embedding",  "head",
               "block",         "per_row",  "symmetric",  "quality",    "backend",
               "bits",          "kind",     "features",   "accepted",   "vocab_map",
               "encoder"});
  ModelRecord model;
  model.engine = fields.text("engine");
  model.geometry = read_geometry(fields.record("geometry"));
  fields.text("model_type");
  fields.whole("parameters");
  model.weight_bytes = static_cast<std::uint64_t>(fields.whole("weight_bytes"));
  model.kv_item_bytes = static_cast<int>(fields.whole("kv_item_bytes", 1, 16));
  fields.texts("fused");
  model.precision = fields.has("precision") ? fields.text("precision") : "fp32";
  for (const char* part : {"embedding", "head"})
    if (fields.has(part)) fields.text(part);
  if (fields.has("block")) fields.whole("block");
  for (const char* name : {"per_row", "symmetric"})
    if (fields.has(name)) fields.boolean(name);
  check_quality(fields);
  if (fields.has("backend")) model.backend = fields.text("backend");
  if (fields.has("bits") && fields.record_or_null("bits")) fields.texts("bits");
  if (fields.has("kind")) model.kind = fields.text("kind");
  if (fields.has("features"))
    model.features = static_cast<int>(fields.whole("features", 0, kMostFeatures));
  if (fields.has("accepted"))
    for (const double share : fields.numbers("accepted"))
      if (share > 1)
        throw std::runtime_error("accepted has a number that is not a share; expected 0 to 1");
  if (fields.has("vocab_map")) model.vocab_map = fields.text("vocab_map");
  if (fields.has("encoder") && fields.record_or_null("encoder"))
    throw std::runtime_error("encoder.cross is missing");
  if (model.backend.empty()) model.backend = backend;
  return model;
}

// What a bundle is for; encoder-decoders were refused before.
void check_task(const Fields& fields) {
  if (fields.has("task")) {
    const std::string task = fields.text("task");
    if (std::find(std::begin(kTasks), std::end(kTasks), task) == std::end(kTasks))
      throw std::runtime_error("task is " + shown(task) + "; expected one of " + kTasks[0] + ", " +
                               kTasks[1] + ", " + kTasks[2]);
  }
  if (fields.has("decoder_start") && !fields.wholes("decoder_start").empty())
    throw std::runtime_error("decoder_start has tokens; expected none without an encoder");
}

std::optional<int> narrow(std::optional<std::int64_t> value) {
  return value ? std::optional<int>(static_cast<int>(*value)) : std::nullopt;
}

// What fits no int is beyond every limit that is checked, too.
std::optional<std::int64_t> within(std::optional<std::int64_t> value) {
  return value ? std::optional(std::min(*value, 2 * kMostCount)) : value;
}

Record read_record(const Json& json) {
  const Fields fields(json, "");
  Record record;
  Manifest& m = record.manifest;
  fields.whole("format", 1, kFormat);
  m.name = fields.text("name");
  m.backend = fields.text("backend");
  m.precision = fields.text("precision");
  m.batch = static_cast<int>(fields.count("batch"));
  m.max_length = static_cast<int>(fields.count("max_length"));
  m.prefill = static_cast<int>(fields.count("prefill"));
  const std::vector<std::int64_t> gammas = fields.wholes("gammas");
  m.gamma = narrow(within(fields.whole_or_null("gamma")));
  if (fields.has("drafter")) m.drafter = fields.text("drafter");
  if (fields.has("snapshot_bytes")) fields.whole("snapshot_bytes", 0, kMostSnapshotBytes);
  m.eos_token_ids = fields.wholes("eos_token_ids");
  m.bos_token_id = fields.whole_or_null("bos_token_id");
  m.target = read_model(fields.record("target"), m.backend);
  if (const auto draft = fields.record_or_null("draft")) m.draft = read_model(*draft, m.backend);
  record.versions = fields.texts("versions");
  record.device = fields.texts("device");
  m.source = fields.text("source");
  for (const auto& [name, file] : fields.named("files")) {
    file.only({"bytes", "sha256"});
    record.files[name] = {static_cast<std::uint64_t>(file.whole("bytes")), file.text("sha256"), {}};
  }
  check_task(fields);
  check_acceptance(fields);
  check_origins(fields);
  check_manifest(record, gammas);
  m.gammas.assign(gammas.begin(), gammas.end());  // below max_length, as was checked
  std::sort(m.gammas.begin(), m.gammas.end());
  m.gammas.erase(std::unique(m.gammas.begin(), m.gammas.end()), m.gammas.end());
  return record;
}

bool exists(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0;
}

Json load(const std::string& folder, const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0 && (errno == ENOENT || errno == ENOTDIR)) {
    const char* what =
        exists(folder) ? " is not a bundle: it has no manifest.json" : " does not exist";
    throw Failure(SPECRT_BUNDLE,
                  folder + what + "; build one with `make engines` or `specrt build RECIPE`");
  }
  try {
    Json json = Json::parse(read_text(path, kMostManifestBytes));
    if (json.kind() != Json::Kind::kObject || json.find("format") == nullptr)
      throw std::runtime_error("it holds " + shown(json) + "; expected an object with `format`");
    return json;
  } catch (const std::runtime_error& error) {
    throw failure_of(SPECRT_BUNDLE, path + " cannot be read", error.what(), kAgain);
  }
}

// An encoder-decoder is told by what it is, not by its format alone.
void refuse_encoder(const std::string& folder, const Json& json) {
  const auto encodes = [&](const char* role) {
    const Json* model = json.find(role);
    if (model == nullptr || model->kind() != Json::Kind::kObject) return false;
    const Json* encoder = model->find("encoder");
    return encoder != nullptr && encoder->kind() == Json::Kind::kObject &&
           encoder->find("cross") != nullptr;
  };
  if (!encodes("target") && !encodes("draft")) return;
  throw Failure(SPECRT_UNSUPPORTED,
                folder +
                    " is an encoder-decoder, which the native implementation does not run; "
                    "use the hosted implementation (-DSPECRT_IMPLEMENTATION=hosted)");
}

}  // namespace

std::string read_text(const std::string& path, std::uint64_t most) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) throw std::runtime_error(std::strerror(errno));
  if (!S_ISREG(info.st_mode)) throw std::runtime_error("it is not a file");  // a pipe would block
  if (static_cast<std::uint64_t>(info.st_size) > most)
    throw std::runtime_error("it has more than " + std::to_string(most) + " bytes");
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(std::strerror(errno));
  std::string text(static_cast<std::size_t>(info.st_size), '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(std::max<std::streamsize>(file.gcount(), 0)));
  return text;
}

Record read_manifest(const std::string& folder) {
  const std::string path = folder + "/manifest.json";
  const Json json = load(folder, path);
  refuse_encoder(folder, json);
  const Json& written = json.at("format");
  if (written.kind() == Json::Kind::kInteger && written.integer() > kFormat)
    throw Failure(SPECRT_BUNDLE, folder + " has bundle format " + shown(written) +
                                     ", and this specrt reads up to " + std::to_string(kFormat) +
                                     "; upgrade specrt, or build the bundle again with this "
                                     "version");
  try {
    return read_record(json);
  } catch (const std::runtime_error& error) {
    throw Failure(SPECRT_BUNDLE,
                  path + " is not a complete manifest (" + error.what() + "); " + kAgain);
  }
}

}  // namespace specrt::native
