// The files of a bundle, which may hold anything, and the text of its tokens.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <vector>

#include "failure.hpp"
#include "native/bundle/bundle.hpp"
#include "native/bundle/manifest.hpp"
#include "native/bundle/sha256.hpp"
#include "native/bundle/tuning.hpp"
#include "native/check.hpp"
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

std::string outcome(const native::Json& one, const std::string& library) {
  OpenOptions options;
  options.onnxruntime = library;
  try {
    const auto threads = static_cast<int>(one.at("threads").integer());
    const native::Bundle bundle = native::open_folder(one.at("path").text(), threads, options);
    std::string said = bundle.tuning ? "tuned" : "opened";
    for (const std::string& notice : bundle.notices) said += ": " + notice;
    return said;
  } catch (const Failure& failure) {
    return "status " + std::to_string(failure.status()) + ": " + failure.what();
  }
}

// What each bundle's opening says must hold a text, in one line that is not too long.
int check_bundle(const native::Json& vectors) {
  int wrong = 0;
  for (const native::Json& one : vectors.at("bundles").items()) {
    const std::string said = outcome(one, vectors.at("library").text());
    const std::string& expected = one.at("says").text();
    const bool fits =
        said.find('\n') == said.npos && said.size() < one.at("path").text().size() * 2 + 500;
    if (fits && said.find(expected) != said.npos) continue;
    std::printf("%s: %s, expected %s\n", one.at("name").text().c_str(), said.c_str(),
                expected.c_str());
    ++wrong;
  }
  return wrong;
}

// "" where the file was read, else what was said of it.
std::string said_of(const std::string& file, const std::string& folder,
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
    const std::string said = said_of(file, folder, manifest);
    const Json& refused = one.at("refused");
    if (said.find('\n') != said.npos || said.size() > folder.size() + 2000) {
      wrong += differs(text, said, "one line that is not too long");
    }
    if (!refused.is_null() && refused.boolean() == said.empty()) {
      wrong += differs(text, said.empty() ? "read" : said, said.empty() ? "refused" : "read");
    }
  }
  return wrong;
}

std::string bytes_of(const Json& numbers) {
  std::string bytes;
  for (const Json& number : numbers.items()) {
    bytes.push_back(static_cast<char>(number.integer()));
  }
  return bytes;
}

// Pieces of bytes, and the text that became certain with each; the last is what was held back.
int decode(const Json& one) {
  native::Utf8Decoder decoder;
  int wrong = 0;
  std::size_t at = 0;
  const auto& expected = one.at("texts").items();
  std::string all;
  for (const Json& piece : one.at("pieces").items()) {
    const std::string bytes = bytes_of(piece);
    all += bytes;
    const std::string text = decoder.push(bytes);
    if (text != expected[at].text()) {
      wrong += differs("decoded", text, expected[at].text());
    }
    ++at;
  }
  const std::string rest = decoder.finish();
  if (rest != expected[at].text()) {
    wrong += differs("held back", rest, expected[at].text());
  }
  if (native::is_utf8(all) != one.at("valid").boolean()) {
    wrong += differs("valid", one.at("valid").boolean() ? "no" : "yes", "the other");
  }
  return wrong;
}

std::vector<std::string> texts_of(const Json& list) {
  std::vector<std::string> texts;
  for (const Json& item : list.items()) {
    texts.push_back(item.text());
  }
  return texts;
}

int stop(const Json& one) {
  native::StopStrings stops(texts_of(one.at("stops")));
  int wrong = 0;
  const auto& expected = one.at("shown").items();
  std::size_t at = 0;
  for (const std::string& piece : texts_of(one.at("pieces"))) {
    const native::StopStrings::Shown shown = stops.push(piece);
    const std::string found = shown.text + "|" + shown.met.value_or("");
    if (found != expected[at].text()) {
      wrong += differs("shown", found, expected[at].text());
    }
    ++at;
    if (shown.met) {
      break;
    }
  }
  if (at == expected.size()) {
    return wrong;
  }
  const std::string rest = stops.finish();
  return wrong + (rest == expected[at].text() ? 0 : differs("rest", rest, expected[at].text()));
}

int text(const Json& vectors) {
  int wrong = 0;
  for (const Json& one : vectors.at("utf8").items()) {
    wrong += decode(one);
  }
  for (const Json& one : vectors.at("stops").items()) {
    wrong += stop(one);
  }
  return wrong;
}

int encode(const native::Json& vectors) {
  const native::Tokenizer tokenizer(vectors.at("bundle").text(), vectors.at("tokenizer").text(),
                                    std::nullopt, std::numeric_limits<int>::max());
  int wrong = tokenizer.encodes() ? 0 : differs("tokenizer", tokenizer.notice(), "nothing to say");
  for (const native::Json& one : vectors.at("texts").items()) {
    std::string found, expected;
    for (const Token token : tokenizer.encode(one.at("text").text())) {
      found += std::to_string(token) + " ";
    }
    for (const native::Json& token : one.at("ids").items()) {
      expected += std::to_string(token.integer()) + " ";
    }
    if (found != expected) wrong += differs(one.at("text").text(), found, expected);
  }
  return wrong;
}

const Registered kJson("json", check_json);
const Registered kSha256("sha256", check_sha256);
const Registered kBundle("bundle", check_bundle);
const Registered kReaders("readers", readers);
const Registered kText("text", text);
const Registered kEncode("encode", encode);

}  // namespace

}  // namespace specrt::checks
