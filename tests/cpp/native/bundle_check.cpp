// The files of a bundle, which may hold anything, and the text of its tokens.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <map>
#include <stdexcept>
#include <vector>

#include "failure.hpp"
#include "native/bundle/bundle.hpp"
#include "native/bundle/manifest.hpp"
#include "native/bundle/sha256.hpp"
#include "native/bundle/tuning.hpp"
#include "native/check.hpp"
#include "native/numbers.hpp"
#include "native/text/detokenizer.hpp"
#include "native/text/tokenizer.hpp"

namespace specrt::checks {

namespace {

using native::Json;

// A value as Python's json.dumps writes it with sorted keys, no spaces, and as UTF-8.
std::string written(const Json& value) {
  std::string text;
  switch (value.kind()) {
    case Json::Kind::kNull:
      return "null";
    case Json::Kind::kBoolean:
      return value.boolean() ? "true" : "false";
    case Json::Kind::kInteger:
      return std::to_string(value.integer());
    case Json::Kind::kNumber:  // hundredths are enough to tell numbers apart
      return std::to_string(static_cast<long long>(value.number() * 100)) + "/100";
    case Json::Kind::kText:
      return native::quoted(value.text());
    case Json::Kind::kList:
      for (const Json& item : value.items()) text += (text.empty() ? "" : ",") + written(item);
      return "[" + text + "]";
    case Json::Kind::kObject:
      for (const auto& [name, item] : value.fields())
        text += (text.empty() ? "" : ",") + native::quoted(name) + ":" + written(item);
      return "{" + text + "}";
  }
  return text;
}

// Bytes come as hexadecimal, so that they need not be JSON themselves.
std::string from_hex(const std::string& hex) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2)
    bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return bytes;
}

int check_json(const Json& vectors) {
  int wrong = 0;
  for (const Json& one : vectors.at("texts").items()) {
    std::string found = "refused";
    try {
      found = written(Json::parse(from_hex(one.at("hex").text())));
    } catch (const std::runtime_error&) {
    }
    const std::string& expected = one.at("reads").text();
    if (found != expected) wrong += differs(one.at("hex").text(), found, expected);
  }
  return wrong;
}

// Without the processor's own instructions, where it has them.
int compare_blocks() {
  std::vector<unsigned char> data(64 * 9);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>(i * 37 + 11);
  std::uint32_t one[8] = {1, 2, 3, 4, 5, 6, 7, 8}, two[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  native::sha256_blocks(one, data.data(), 9);
  native::sha256_blocks_plain(two, data.data(), 9);
  return std::equal(one, one + 8, two) ? 0 : differs("blocks", "two states", "one");
}

int check_sha256(const native::Json& vectors) {
  int wrong = compare_blocks();
  for (const native::Json& file : vectors.at("files").items()) {
    const std::string& path = file.at("path").text();
    const std::string found = native::hash_file(path).sha256;
    const std::string& expected = file.at("sha256").text();
    if (found != expected) wrong += differs(path, found, expected);
  }
  return wrong;
}

// What opening each bundle says must hold a text, in one line that is not too long.
int check_bundle(const Json& vectors) {
  OpenOptions options;
  options.onnxruntime = vectors.at("library").text();
  int wrong = 0;
  for (const Json& one : vectors.at("bundles").items()) {
    const std::string& path = one.at("path").text();
    const std::string& expected = one.at("says").text();
    std::string message;
    try {
      const native::Bundle bundle = native::open_folder(path, 1, options);
      message = bundle.tuning ? "tuned" : "opened";
      for (const std::string& notice : bundle.notices) message += ": " + notice;
    } catch (const Failure& failure) {
      message = "status " + std::to_string(failure.status()) + ": " + failure.what();
    }
    const bool fits = message.find('\n') == message.npos && message.size() < path.size() * 2 + 500;
    if (!fits || message.find(expected) == message.npos) wrong += differs(path, message, expected);
  }
  return wrong;
}

// "" where the file was read, else what was said of it.
std::string refusal_of(const std::string& file, const std::string& folder,
                       const native::Manifest& manifest) {
  try {
    if (file == "manifest.json") {
      native::read_manifest(folder);
    } else if (file == "tuning.json") {
      const auto found = native::read_tuning(folder, manifest, 1, "onnxruntime 1.0");
      const std::string notice = found.notice.value_or("");
      return notice.find("it is damaged") == notice.npos ? "" : notice;
    } else {
      const native::Tokenizer tokenizer(folder, "", std::nullopt, 300);
      tokenizer.decode({0, 1, 299, 300, 1 << 20});
    }
    return "";
  } catch (const Failure& failure) {
    return failure.status() == SPECRT_BUNDLE ? failure.what() : "another status than of bundles";
  }
}

int readers(const Json& vectors) {
  const std::string folder = vectors.at("folder").text();
  const native::Manifest manifest = native::read_manifest(folder).manifest;
  int wrong = 0;
  for (const Json& one : vectors.at("cases").items()) {
    const std::string& file = one.at("file").text();
    const std::string text = from_hex(one.at("hex").text());
    std::ofstream(folder + "/" + file, std::ios::binary) << text;
    const std::string said = refusal_of(file, folder, manifest);
    const Json& refused = one.at("refused");
    if (said.find('\n') != said.npos || said.size() > folder.size() + 2000)
      wrong += differs(text, said, "one line that is not too long");
    if (!refused.is_null() && refused.boolean() == said.empty())
      wrong += differs(text, said.empty() ? "read" : said, said.empty() ? "refused" : "read");
  }
  return wrong;
}

std::string listed(const std::vector<double>& numbers) {
  return shown(std::vector<Token>(numbers.begin(), numbers.end()));
}

using Texts = std::map<std::string, std::string>;

void add_model(const std::string& role, const native::ModelRecord& model, Texts& fields) {
  const native::Geometry& shape = model.geometry;
  fields[role + "engine"] = model.engine;
  fields[role + "backend"] = model.backend;
  fields[role + "precision"] = model.precision;
  fields[role + "geometry"] =
      shown(std::vector<Token>{shape.layers, shape.heads, shape.kv_heads, shape.head_dim,
                               shape.vocab_size, shape.max_positions});
  fields[role + "weights"] =
      shown(std::vector<Token>{model.quantized, model.half_stored, model.kv_item_bytes,
                               static_cast<Token>(model.weight_bytes)});
}

// What the files of a bundle hold, a text for each field.
int check_record(const Json& vectors) {
  const std::string folder = vectors.at("folder").text();
  const native::Record record = native::read_manifest(folder);
  const native::Manifest& m = record.manifest;
  Texts fields{{"name", m.name},
               {"backend", m.backend},
               {"precision", m.precision},
               {"source", m.source},
               {"gamma", std::to_string(m.gamma.value_or(-1))},
               {"gammas", shown(std::vector<Token>(m.gammas.begin(), m.gammas.end()))},
               {"tokens", shown(m.eos_token_ids) + std::to_string(m.bos_token_id.value_or(-1))},
               {"sizes", shown(std::vector<Token>{m.batch, m.max_length, m.prefill})}};
  add_model("target.", m.target, fields);
  if (m.draft) add_model("draft.", *m.draft, fields);
  for (const auto& [name, version] : record.versions) fields["versions"] += name + version;
  for (const auto& [name, value] : record.device) fields["device"] += name + value;
  for (const auto& [name, file] : record.files)
    fields["files"] += name + std::to_string(file.bytes) + file.sha256;
  const auto found = native::read_tuning(folder, m, 1, vectors.at("library").text());
  fields["notice"] = found.notice.value_or("");
  const native::Tuning tuning = found.tuning.value_or(native::Tuning{});
  fields["costs"] = listed(tuning.costs.verify_ns) + listed(tuning.costs.draft_ns) +
                    std::to_string(static_cast<Token>(tuning.costs.outside_ns));
  fields["tuned"] =
      tuning.drafter + " " + std::to_string(tuning.gamma) + (tuning.pad_to_even ? " even" : "");
  const Json& expected = vectors.at("fields");
  int wrong = same("fields", fields.size(), expected.fields().size());
  for (const auto& [name, text] : fields) wrong += same(name, text, expected.at(name).text());
  return wrong;
}

std::string bytes_of(const Json& numbers) {
  std::string bytes;
  for (const Json& number : numbers.items()) bytes.push_back(static_cast<char>(number.integer()));
  return bytes;
}

// Pieces of bytes, and the text that became certain with each; the last is what was held back.
int decode(const Json& one) {
  native::Utf8Decoder decoder;
  std::string all;
  std::vector<std::string> texts;
  for (const Json& piece : one.at("pieces").items()) {
    const std::string bytes = bytes_of(piece);
    all += bytes;
    texts.push_back(decoder.push(bytes));
  }
  texts.push_back(decoder.finish());
  const bool valid = native::is_utf8(all);
  int wrong = valid == one.at("valid").boolean() ? 0 : differs("valid", all, "the other");
  for (std::size_t i = 0; i < texts.size(); ++i)
    wrong += same("decoded", texts[i], one.at("texts").items().at(i).text());
  return wrong;
}

int stop(const Json& one) {
  native::StopStrings stops(texts_of(one.at("stops")));
  std::vector<std::string> found;
  bool met = false;
  for (const std::string& piece : texts_of(one.at("pieces"))) {
    const native::StopStrings::Shown shown = stops.push(piece);
    found.push_back(shown.text + "|" + shown.met.value_or(""));
    met = shown.met.has_value();
    if (met) break;
  }
  if (!met) found.push_back(stops.finish());
  int wrong = same("shown", found.size(), one.at("shown").items().size());
  for (std::size_t i = 0; wrong == 0 && i < found.size(); ++i)
    wrong += same("shown", found[i], one.at("shown").items()[i].text());
  return wrong;
}

int text(const Json& vectors) {
  int wrong = 0;
  for (const Json& one : vectors.at("utf8").items()) wrong += decode(one);
  for (const Json& one : vectors.at("stops").items()) wrong += stop(one);
  return wrong;
}

int encode(const Json& vectors) {
  const native::Tokenizer tokenizer(vectors.at("bundle").text(), vectors.at("tokenizer").text(),
                                    std::nullopt, std::numeric_limits<int>::max());
  int wrong = tokenizer.encodes() ? 0 : differs("tokenizer", tokenizer.notice(), "nothing to say");
  for (const Json& one : vectors.at("texts").items())
    wrong += same(one.at("text").text(), tokenizer.encode(one.at("text").text()),
                  tokens_of(one.at("ids")));
  return wrong;
}

const Registered kJson("json", check_json);
const Registered kSha256("sha256", check_sha256);
const Registered kBundle("bundle", check_bundle);
const Registered kRecord("record", check_record);
const Registered kReaders("readers", readers);
const Registered kText("text", text);
const Registered kEncode("encode", encode);

}  // namespace

}  // namespace specrt::checks
