// The files of a bundle, which may hold anything, and the text of its tokens.
#include "native/bundle/bundle.hpp"

#include <fstream>
#include <limits>
#include <stdexcept>

#include "failure.hpp"
#include "native/answers.hpp"
#include "native/bundle/manifest.hpp"
#include "native/bundle/sha256.hpp"
#include "native/bundle/tuning.hpp"
#include "native/engine/external_data.hpp"
#include "native/text/detokenizer.hpp"
#include "native/text/tokenizer.hpp"

namespace specrt::checks {

namespace {

// Bytes come as hexadecimal, so that they need not be text.
std::string from_hex(const std::string& hex) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2)
    bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return bytes;
}

std::string written(const Json& value) {
  std::vector<std::string> items;
  std::vector<std::pair<std::string, std::string>> fields;
  switch (value.kind()) {
    case Json::Kind::kNull:
      return "null";
    case Json::Kind::kBoolean:
      return json(value.boolean());
    case Json::Kind::kInteger:
      return json(value.integer());
    case Json::Kind::kNumber:
      return json(value.number());
    case Json::Kind::kText:
      return json(value.text());
    case Json::Kind::kList:
      for (const Json& item : value.items()) items.push_back(written(item));
      return list(items);
    case Json::Kind::kObject:
      for (const auto& [name, item] : value.fields()) fields.emplace_back(name, written(item));
      return object(fields);
  }
  return "";
}

std::string parse(const Json& call) {
  try {
    return written(Json::parse(from_hex(get<std::string>(call, "hex"))));
  } catch (const std::runtime_error&) {
    return json(std::string("refused"));
  }
}

// By the processor's own instructions, where it has them, and in plain C++.
std::string hashed(const Json& call) {
  const std::string text = from_hex(get<std::string>(call, "blocks"));
  const auto* const data = reinterpret_cast<const unsigned char*>(text.data());
  std::vector<std::uint32_t> one{1, 2, 3, 4, 5, 6, 7, 8}, two = one;
  native::sha256_blocks(one.data(), data, text.size() / 64);
  native::sha256_blocks_plain(two.data(), data, text.size() / 64);
  return object({{"sha256", json(native::hash_file(get<std::string>(call, "path")).sha256)},
                 {"same", json(one == two)}});
}

std::string opened(const Json& call) {
  OpenOptions options;
  options.onnxruntime = get<std::string>(call, "library");
  const native::Bundle bundle = native::open_folder(get<std::string>(call, "path"), 1, options);
  return json(bundle.notices);
}

// Nothing where a file was read, else what was said of it.
std::optional<std::string> refusal_of(const std::string& file, const std::string& folder,
                                      const native::Manifest& manifest) {
  try {
    if (file == "manifest.json") {
      native::read_manifest(folder);
    } else if (file == "tuning.json") {
      const auto notice = native::read_tuning(folder, manifest, 1, "onnxruntime 1.0").notice;
      if (notice && notice->find("it is damaged") != notice->npos) return notice;
    } else {
      const native::Tokenizer tokenizer(folder, "", std::nullopt, 300);
      tokenizer.decode({0, 1, 299, 300, 1 << 20});
    }
    return std::nullopt;
  } catch (const Failure& failure) {
    return failure.status() == SPECRT_BUNDLE ? failure.what() : "\nanother status than of bundles";
  }
}

std::string refusals(const Json& call) {
  const auto folder = get<std::string>(call, "folder"), file = get<std::string>(call, "file");
  const native::Manifest manifest = native::read_manifest(folder).manifest;
  std::vector<std::optional<std::string>> answers;
  for (const auto& hex : get<std::vector<std::string>>(call, "texts")) {
    std::ofstream(folder + "/" + file, std::ios::binary) << from_hex(hex);
    answers.push_back(refusal_of(file, folder, manifest));
  }
  return json(answers);
}

std::string model_of(const native::ModelRecord& model) {
  const native::Geometry& shape = model.geometry;
  std::vector<int> sizes{shape.heads, shape.vocab_size, shape.max_positions};
  for (const native::MemoryBuffer& one : shape.buffers())
    sizes.insert(sizes.end(), {one.heads, one.width});
  return object({{"engine", json(model.engine)},
                 {"backend", json(model.backend)},
                 {"precision", json(model.precision)},
                 {"geometry", json(sizes)},
                 {"kv_item_bytes", json(model.kv_item_bytes)},
                 {"weight_bytes", json(model.weight_bytes)},
                 {"kind", json(model.kind)},
                 {"features", json(model.features)},
                 {"vocab_map", json(model.vocab_map)}});
}

// What the files of a bundle hold.
std::string record(const Json& call) {
  const auto folder = get<std::string>(call, "folder");
  const native::Record record = native::read_manifest(folder);
  const native::Manifest& m = record.manifest;
  std::vector<std::pair<std::string, std::string>> versions, device, files;
  for (const auto& [name, version] : record.versions) versions.emplace_back(name, json(version));
  for (const auto& [name, value] : record.device) device.emplace_back(name, json(value));
  for (const auto& [name, file] : record.files)
    files.emplace_back(name, list({json(file.bytes), json(file.sha256)}));
  const auto found = native::read_tuning(folder, m, 1, get<std::string>(call, "library"));
  const native::Tuning tuning = found.tuning.value_or(native::Tuning{});
  return object({{"name", json(m.name)},
                 {"backend", json(m.backend)},
                 {"precision", json(m.precision)},
                 {"source", json(m.source)},
                 {"gamma", json(m.gamma)},
                 {"gammas", json(m.gammas)},
                 {"eos_token_ids", json(m.eos_token_ids)},
                 {"bos_token_id", json(m.bos_token_id)},
                 {"sizes", json(std::vector<int>{m.batch, m.max_length, m.prefill})},
                 {"target", model_of(m.target)},
                 {"draft", m.draft ? model_of(*m.draft) : "null"},
                 {"versions", object(versions)},
                 {"device", object(device)},
                 {"files", object(files)},
                 {"notice", json(found.notice)},
                 {"verify_ns", json(tuning.costs.verify_ns)},
                 {"draft_ns", json(tuning.costs.draft_ns)},
                 {"outside_ns", json(tuning.costs.outside_ns)},
                 {"drafter", json(tuning.drafter)},
                 {"fixed_gamma", json(tuning.gamma)}});
}

// Pieces of bytes, and the text that became certain with each; the last is what was held back.
std::string decoded(const Json& call) {
  native::Utf8Decoder decoder;
  std::string all;
  std::vector<std::string> texts;
  for (const auto& hex : get<std::vector<std::string>>(call, "pieces")) {
    all += from_hex(hex);
    texts.push_back(decoder.push(from_hex(hex)));
  }
  texts.push_back(decoder.finish());
  return object({{"texts", json(texts)}, {"valid", json(native::is_utf8(all))}});
}

std::string stopped(const Json& call) {
  native::StopStrings stops(get<std::vector<std::string>>(call, "stops"));
  std::vector<std::string> texts;
  for (const auto& piece : get<std::vector<std::string>>(call, "pieces")) {
    const native::StopStrings::Shown shown = stops.push(piece);
    texts.push_back(shown.text);
    if (!shown.met) continue;
    texts.push_back(*shown.met);
    return json(texts);
  }
  texts.push_back(stops.finish());
  return json(texts);
}

std::string encoded(const Json& call) {
  const native::Tokenizer tokenizer(get<std::string>(call, "bundle"),
                                    get<std::string>(call, "tokenizer"), std::nullopt,
                                    std::numeric_limits<int>::max());
  std::vector<std::vector<Token>> ids;
  for (const auto& text : get<std::vector<std::string>>(call, "texts"))
    ids.push_back(tokenizer.encode(text, true, get<bool>(call, "parse_special")));
  return json(ids);
}

// The text that becomes certain with each piece of a completion, what was held back at its end, the
// text of all tokens, prompt included, and that of the last one after others.
std::string detokenized(const Json& call) {
  const native::Tokenizer tokenizer(get<std::string>(call, "folder"), "", std::nullopt, 1 << 20);
  auto all = get<std::vector<Token>>(call, "prompt");
  const auto detokenizer = tokenizer.detokenizer(all);
  std::vector<std::string> texts;
  for (const auto& piece : get<std::vector<std::vector<Token>>>(call, "pieces")) {
    all.insert(all.end(), piece.begin(), piece.end());
    texts.push_back(detokenizer->push(piece.data(), piece.size()));
  }
  texts.push_back(detokenizer->finish());
  texts.push_back(tokenizer.decode(all));
  texts.push_back(tokenizer.piece(all.back()));
  return json(texts);
}

std::string external(const Json& call) {
  try {
    const auto found = native::external_data(from_hex(get<std::string>(call, "hex")));
    return json(std::vector<std::string>(found.begin(), found.end()));
  } catch (const std::runtime_error&) {
    return json(std::string("refused"));
  }
}

const Registered kBundle({{"parse", parse},
                          {"detokenized", detokenized},
                          {"external", external},
                          {"hashed", hashed},
                          {"opened", opened},
                          {"refusals", refusals},
                          {"record", record},
                          {"decoded", decoded},
                          {"stopped", stopped},
                          {"encoded", encoded}});

}  // namespace

}  // namespace specrt::checks
