#include "native/tokenizer.hpp"

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>

#include "failure.hpp"
#include "native/digits.hpp"
#include "native/utf8.hpp"

namespace specrt::native {

namespace {

constexpr std::int64_t kMostTokens = 1 << 30;

// The byte that each code point of a byte-level vocabulary stands for, -1 for others: printable
// bytes stand for themselves, the others for the code points from 256 on, in order (Radford et al.
// 2019).
std::array<int, 512> byte_symbols() {
  std::array<int, 512> symbols{};
  symbols.fill(-1);
  std::size_t next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 33 && byte < 127) || (byte >= 161 && byte != 173);
    symbols[printable ? static_cast<std::size_t>(byte) : next++] = byte;
  }
  return symbols;
}

// The bytes a token spells; one with other characters in it is its own text.
std::string token_bytes(const std::string& name) {
  static const std::array<int, 512> symbols = byte_symbols();
  std::string bytes;
  for (std::size_t i = 0; i < name.size(); ++i) {
    const auto lead = static_cast<unsigned char>(name[i]);
    std::size_t point = lead;
    if (lead >= 0x80) {
      if (lead >= 0xE0 || i + 1 >= name.size()) {
        return name;
      }
      point = (lead & 0x1FU) << 6 | (static_cast<unsigned char>(name[++i]) & 0x3FU);
    }
    if (point >= symbols.size() || symbols[point] < 0) {
      return name;
    }
    bytes.push_back(static_cast<char>(symbols[point]));
  }
  return bytes;
}

// Whether a part of a tokenizer, or one that it is made of, is of a type.
bool has_type(const Json& part, const char* type) {
  if (part.kind() == Json::Kind::kObject) {
    for (const auto& [name, value] : part.fields()) {
      if ((name == "type" && value.text() == type) || has_type(value, type)) {
        return true;
      }
    }
  } else if (part.kind() == Json::Kind::kList) {
    return std::any_of(part.items().begin(), part.items().end(),
                       [type](const Json& item) { return has_type(item, type); });
  }
  return false;
}

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

Tokenizer::Tokenizer(const std::string& bundle, const std::string& library,
                     std::optional<Token> bos, std::size_t scored)
    : bos_(bos), scored_(scored) {
  const std::string path = bundle + "/tokenizer.json";
  try {
    read(Json::parse(contents(path)));
  } catch (const std::runtime_error& error) {
    throw Failure(SPECRT_BUNDLE,
                  path + " is not a tokenizer: " + error.what() + "; build the bundle again");
  }
  if (library.empty() || !notice_.empty()) {
    return;
  }
  try {
    library_ = std::make_unique<GenaiTokenizer>(library, bundle);
    library_adds_ = library_->encode("").size();
  } catch (const Failure& failure) {
    library_.reset();
    notice_ = std::string(failure.what()) + "; prompts must be token ids";
  }
}

void Tokenizer::read(const Json& file) {
  const Json* const decoder = file.find("decoder");
  if (decoder != nullptr && !decoder->is_null()) {
    joins_bytes_ = decoder->at("type").text() == "ByteLevel";
    falls_back_to_bytes_ = has_type(*decoder, "ByteFallback");
  }
  if (const Json* const parted = file.find("pre_tokenizer")) {
    parts_digits_ = has_type(*parted, "Digits");
  }
  const Json& vocabulary = file.at("model").at("vocab");
  if (vocabulary.kind() == Json::Kind::kObject) {
    for (const auto& [name, token] : vocabulary.fields()) {
      add(token.integer(), name, false);
    }
  } else {  // of unigram models: pairs of a name and a score
    Token token = 0;
    for (const Json& pair : vocabulary.items()) {
      if (pair.items().empty()) {
        throw std::runtime_error("a token of its vocabulary has no name; expected one");
      }
      add(token++, pair.items()[0].text(), false);
    }
  }
  const Json* const processor = file.find("post_processor");
  if (processor != nullptr && !processor->is_null()) {
    read_template(*processor);
  }
  const Json* const added = file.find("added_tokens");
  if (added != nullptr && !added->is_null()) {
    for (const Json& token : added->items()) {
      add(token.at("id").integer(), token.at("content").text(), token.at("special").boolean());
    }
  }
}

// Only templates add tokens to a text; byte-level processors move offsets.
void Tokenizer::read_template(const Json& processor) {
  const std::string& type = processor.at("type").text();
  if (type == "Sequence") {
    for (const Json& part : processor.at("processors").items()) {
      read_template(part);
    }
  } else if (type == "TemplateProcessing") {
    bool met = false;
    for (const Json& piece : processor.at("single").items()) {
      const Json* const special = piece.find("SpecialToken");
      met = met || special == nullptr;
      if (special != nullptr) {
        const Json& known = processor.at("special_tokens").at(special->at("id").text());
        for (const Json& id : known.at("ids").items()) {
          (met ? behind_ : before_).push_back(id.integer());
        }
      }
    }
  } else if (type != "ByteLevel") {
    notice_ = "the tokenizer's post-processor is " + type +
              ", expected TemplateProcessing or ByteLevel; prompts must be token ids";
  }
}

void Tokenizer::add(Token token, const std::string& name, bool special) {
  if (token < 0 || token > kMostTokens) {
    throw std::runtime_error("it has a token " + std::to_string(token) + ", expected 0 to " +
                             std::to_string(kMostTokens));
  }
  const auto at = static_cast<std::size_t>(token);
  size_ = std::max(size_, at + 1);
  if (special) {
    special_.insert(token);
  }
  if (joins_bytes_ && at < scored_) {
    bytes_.resize(std::max(bytes_.size(), at + 1));
    bytes_[at] = special ? "" : token_bytes(name);
  }
}

std::vector<Token> Tokenizer::ids_of(const std::string& text) const {
  if (library_ == nullptr) {
    throw Failure(
        SPECRT_UNSUPPORTED,
        "text was given, and no tokenizer library is known: give token ids, build with "
        "`specrt config --build --native --tokenizer FILE`, or open with `tokenizer` set; "
        "FILE is libonnxruntime-genai.so, of the package onnxruntime-genai" +
            (notice_.empty() ? "" : " (" + notice_ + ")"));
  }
  if (text.find('\0') != std::string::npos) {
    throw Failure(SPECRT_UNSUPPORTED,
                  "the text holds a zero byte, which the tokenizer library cannot read; leave it "
                  "out, or give token ids");
  }
  std::vector<Token> ids;
  for (const std::string& part : parts_digits_ ? before_digits(text) : std::vector{text}) {
    const std::vector<Token> own = library_->encode(part);
    const std::size_t added = std::min(library_adds_, own.size());
    ids.insert(ids.end(), own.begin() + static_cast<std::ptrdiff_t>(added), own.end());
  }
  return ids;
}

std::vector<Token> Tokenizer::encode(const std::string& text, bool special) const {
  if (!is_utf8(text)) {
    throw Failure(SPECRT_INVALID_ARGUMENT, "the text is not valid UTF-8; expected UTF-8");
  }
  std::vector<Token> ids = ids_of(text);
  if (special) {
    ids.insert(ids.begin(), before_.begin(), before_.end());
    ids.insert(ids.end(), behind_.begin(), behind_.end());
  }
  if (ids.empty() && special) {
    if (!bos_) {
      throw Failure(SPECRT_INVALID_ARGUMENT,
                    "the prompt is empty and this model has no BOS token to start from; give at "
                    "least one character");
    }
    ids.push_back(*bos_);
  }
  return ids;
}

std::string Tokenizer::decode(const std::vector<Token>& ids) const {
  if (joins_bytes_) {
    ByteDetokenizer joined(bytes_);
    const std::string text = joined.push(ids.data(), ids.size());
    return text + joined.finish();
  }
  if (library_ == nullptr) {
    return "";
  }
  std::vector<Token> kept;
  std::copy_if(ids.begin(), ids.end(), std::back_inserter(kept), [this](Token token) {
    return token >= 0 && static_cast<std::size_t>(token) < size_ && special_.count(token) == 0;
  });
  return kept.empty() ? "" : library_->decode(kept);
}

std::unique_ptr<Detokenizer> Tokenizer::detokenizer() const {
  if (joins_bytes_) {
    return std::make_unique<ByteDetokenizer>(bytes_);
  }
  if (library_ == nullptr) {
    return std::make_unique<NoDetokenizer>();
  }
  return std::make_unique<AskingDetokenizer>(
      [this](const std::vector<Token>& ids) { return decode(ids); });
}

}  // namespace specrt::native
