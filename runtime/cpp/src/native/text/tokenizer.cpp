#include "native/text/tokenizer.hpp"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <set>

#include "failure.hpp"
#include "native/bundle/manifest.hpp"
#include "native/text/detokenizer.hpp"
#include "native/text/json.hpp"

namespace specrt::native {

namespace {

struct Range {
  unsigned first, last;
};

constexpr Range kSpaces[] = {{0x9, 0xD},       {0x20, 0x20},     {0x85, 0x85},     {0xA0, 0xA0},
                             {0x1680, 0x1680}, {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F},
                             {0x205F, 0x205F}, {0x3000, 0x3000}};

// Unicode's categories Nd, Nl and No.
constexpr Range kNumbers[] = {
    {0x30, 0x39},       {0xB2, 0xB3},       {0xB9, 0xB9},       {0xBC, 0xBE},
    {0x660, 0x669},     {0x6F0, 0x6F9},     {0x7C0, 0x7C9},     {0x966, 0x96F},
    {0x9E6, 0x9EF},     {0x9F4, 0x9F9},     {0xA66, 0xA6F},     {0xAE6, 0xAEF},
    {0xB66, 0xB6F},     {0xB72, 0xB77},     {0xBE6, 0xBF2},     {0xC66, 0xC6F},
    {0xC78, 0xC7E},     {0xCE6, 0xCEF},     {0xD58, 0xD5E},     {0xD66, 0xD78},
    {0xDE6, 0xDEF},     {0xE50, 0xE59},     {0xED0, 0xED9},     {0xF20, 0xF33},
    {0x1040, 0x1049},   {0x1090, 0x1099},   {0x1369, 0x137C},   {0x16EE, 0x16F0},
    {0x17E0, 0x17E9},   {0x17F0, 0x17F9},   {0x1810, 0x1819},   {0x1946, 0x194F},
    {0x19D0, 0x19DA},   {0x1A80, 0x1A89},   {0x1A90, 0x1A99},   {0x1B50, 0x1B59},
    {0x1BB0, 0x1BB9},   {0x1C40, 0x1C49},   {0x1C50, 0x1C59},   {0x2070, 0x2070},
    {0x2074, 0x2079},   {0x2080, 0x2089},   {0x2150, 0x2182},   {0x2185, 0x2189},
    {0x2460, 0x249B},   {0x24EA, 0x24FF},   {0x2776, 0x2793},   {0x2CFD, 0x2CFD},
    {0x3007, 0x3007},   {0x3021, 0x3029},   {0x3038, 0x303A},   {0x3192, 0x3195},
    {0x3220, 0x3229},   {0x3248, 0x324F},   {0x3251, 0x325F},   {0x3280, 0x3289},
    {0x32B1, 0x32BF},   {0xA620, 0xA629},   {0xA6E6, 0xA6EF},   {0xA830, 0xA835},
    {0xA8D0, 0xA8D9},   {0xA900, 0xA909},   {0xA9D0, 0xA9D9},   {0xA9F0, 0xA9F9},
    {0xAA50, 0xAA59},   {0xABF0, 0xABF9},   {0xFF10, 0xFF19},   {0x10107, 0x10133},
    {0x10140, 0x10178}, {0x1018A, 0x1018B}, {0x102E1, 0x102FB}, {0x10320, 0x10323},
    {0x10341, 0x10341}, {0x1034A, 0x1034A}, {0x103D1, 0x103D5}, {0x104A0, 0x104A9},
    {0x10858, 0x1085F}, {0x10879, 0x1087F}, {0x108A7, 0x108AF}, {0x108FB, 0x108FF},
    {0x10916, 0x1091B}, {0x109BC, 0x109BD}, {0x109C0, 0x109CF}, {0x109D2, 0x109FF},
    {0x10A40, 0x10A48}, {0x10A7D, 0x10A7E}, {0x10A9D, 0x10A9F}, {0x10AEB, 0x10AEF},
    {0x10B58, 0x10B5F}, {0x10B78, 0x10B7F}, {0x10BA9, 0x10BAF}, {0x10CFA, 0x10CFF},
    {0x10D30, 0x10D39}, {0x10E60, 0x10E7E}, {0x10F1D, 0x10F26}, {0x10F51, 0x10F54},
    {0x10FC5, 0x10FCB}, {0x11052, 0x1106F}, {0x110F0, 0x110F9}, {0x11136, 0x1113F},
    {0x111D0, 0x111D9}, {0x111E1, 0x111F4}, {0x112F0, 0x112F9}, {0x11450, 0x11459},
    {0x114D0, 0x114D9}, {0x11650, 0x11659}, {0x116C0, 0x116C9}, {0x11730, 0x1173B},
    {0x118E0, 0x118F2}, {0x11950, 0x11959}, {0x11C50, 0x11C6C}, {0x11D50, 0x11D59},
    {0x11DA0, 0x11DA9}, {0x11FC0, 0x11FD4}, {0x12400, 0x1246E}, {0x16A60, 0x16A69},
    {0x16AC0, 0x16AC9}, {0x16B50, 0x16B59}, {0x16B5B, 0x16B61}, {0x16E80, 0x16E96},
    {0x1D2E0, 0x1D2F3}, {0x1D360, 0x1D378}, {0x1D7CE, 0x1D7FF}, {0x1E140, 0x1E149},
    {0x1E2F0, 0x1E2F9}, {0x1E8C7, 0x1E8CF}, {0x1E950, 0x1E959}, {0x1EC71, 0x1ECAB},
    {0x1ECAD, 0x1ECAF}, {0x1ECB1, 0x1ECB4}, {0x1ED01, 0x1ED2D}, {0x1ED2F, 0x1ED3D},
    {0x1F100, 0x1F10C}, {0x1FBF0, 0x1FBF9}};

template <std::size_t count>
bool is_one(const Range (&ranges)[count], unsigned code) {
  const auto* const after =
      std::upper_bound(std::begin(ranges), std::end(ranges), code,
                       [](unsigned value, const Range& range) { return value < range.first; });
  return after != std::begin(ranges) && code <= std::prev(after)->last;
}

// The code point of a whole character.
unsigned code_of(std::string_view one) {
  const auto first = static_cast<unsigned char>(one[0]);
  if (one.size() == 1) {
    return first;
  }
  unsigned code = first & (0x7FU >> one.size());
  for (std::size_t i = 1; i < one.size(); ++i) {
    code = code << 6 | (static_cast<unsigned char>(one[i]) & 0x3FU);
  }
  return code;
}

}  // namespace

std::vector<std::string> before_digits(const std::string& text) {
  std::vector<std::string> parts(1);
  bool spaced = false;
  for (std::size_t at = 0; at < text.size();) {
    const std::string_view one =
        std::string_view(text).substr(at, std::max<std::size_t>(character(text, at).bytes, 1));
    const unsigned code = code_of(one);
    if (spaced && is_one(kNumbers, code)) {
      parts.emplace_back();
    }
    spaced = is_one(kSpaces, code);
    parts.back() += one;
    at += one.size();
  }
  return parts;
}

namespace {

constexpr std::int64_t kMostTokens = 1 << 30;

// Whether an added token is a control token by its name, as <|user|> is; U+FF5C is a bar, too.
bool is_control(const std::string& name) {
  for (const std::string begin : {"<|", "<\xEF\xBD\x9C"}) {
    for (const std::string end : {"|>", "\xEF\xBD\x9C>"}) {
      if (name.size() >= begin.size() + end.size() && name.rfind(begin, 0) == 0 &&
          name.compare(name.size() - end.size(), end.size(), end) == 0) {
        return true;
      }
    }
  }
  return false;
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

}  // namespace

Tokenizer::Tokenizer(const std::string& bundle, const std::string& library,
                     std::optional<Token> bos, std::size_t scored)
    : bos_(bos), scored_(scored) {
  const std::string path = bundle + "/tokenizer.json";
  try {
    read(Json::parse(read_text(path, UINT64_MAX)));
  } catch (const std::runtime_error& error) {
    throw failure_of(SPECRT_BUNDLE, path + " is not a tokenizer", error.what(),
                     "build the bundle again");
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
    decoder_ = Decoder::read(*decoder);
  }
  if (decoder_) {
    spelling_.stripped = decoder_->stripped();
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
      const std::string& name = token.at("content").text();
      const bool special = token.at("special").boolean();
      add(token.at("id").integer(), name, special);
      if (!special && is_control(name)) controls_.push_back(name);
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
    controls_.push_back(name);
  }
  if (!decoder_ || at >= scored_) {
    return;
  }
  const std::size_t count = std::max(spelling_.bytes.size(), at + 1);
  spelling_.bytes.resize(count);
  spelling_.bytes[at] = special ? "" : decoder_->bytes(name);
  if (decoder_->tells_first()) {
    spelling_.first.resize(count);
    spelling_.first[at] = special ? "" : decoder_->first_bytes(name);
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
  std::vector<Token> ids;
  for (const std::string& part : parts_digits_ ? before_digits(text) : std::vector{text}) {
    const std::vector<Token> own = library_->encode(part);
    const std::size_t added = std::min(library_adds_, own.size());
    ids.insert(ids.end(), own.begin() + static_cast<std::ptrdiff_t>(added), own.end());
  }
  return ids;
}

// The ids of a text in which nothing is a control token: cut after the first character of each, so
// that the library sees none whole.
std::vector<Token> Tokenizer::plain_ids_of(const std::string& text) const {
  std::set<std::size_t> cuts = {text.size()};
  for (const std::string& control : controls_) {
    std::size_t at = control.empty() ? std::string::npos : text.find(control);
    for (; at != std::string::npos; at = text.find(control, at + 1)) {
      cuts.insert(at + character(text, at).bytes);
    }
  }
  std::vector<Token> ids;
  std::size_t begin = 0;
  for (const std::size_t cut : cuts) {
    const std::vector<Token> part = ids_of(text.substr(begin, cut - begin));
    ids.insert(ids.end(), part.begin(), part.end());
    begin = cut;
  }
  if (cuts.size() > 1 && decode(ids) != text) {
    throw Failure(SPECRT_UNSUPPORTED,
                  "the text holds the text of a control token, parse_special is 0, and the "
                  "tokenizer library cannot spell it as plain text; leave it out, give token ids, "
                  "or use the hosted library");
  }
  return ids;
}

std::vector<Token> Tokenizer::encode(const std::string& text, bool special,
                                     bool parse_special) const {
  if (!is_utf8(text)) {
    throw Failure(SPECRT_INVALID_ARGUMENT, "the text is not valid UTF-8; expected UTF-8");
  }
  std::vector<Token> ids = parse_special ? ids_of(text) : plain_ids_of(text);
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

std::vector<Token> Tokenizer::encode_middle(const std::string& text) const {
  const std::vector<Token> line = encode("\n", false);
  const std::vector<Token> whole = encode("\n" + text, false);
  const auto parted = std::mismatch(line.begin(), line.end(), whole.begin(), whole.end());
  return parted.first == line.end() ? std::vector<Token>(parted.second, whole.end())
                                    : encode(text, false);
}

// Whether there may be text of a token.
bool Tokenizer::is_text(Token token) const {
  return token >= 0 && static_cast<std::size_t>(token) < size_ && special_.count(token) == 0;
}

std::string Tokenizer::decode(const std::vector<Token>& ids) const {
  if (decoder_) {
    ByteDetokenizer joined(spelling_);
    const std::string text = joined.push(ids.data(), ids.size());
    return text + joined.finish();
  }
  if (library_ == nullptr) {
    return "";
  }
  std::vector<Token> visible;
  std::copy_if(ids.begin(), ids.end(), std::back_inserter(visible),
               [this](Token token) { return is_text(token); });
  return visible.empty() ? "" : library_->decode(visible);
}

std::string Tokenizer::piece(Token token) const {
  if (!decoder_) {
    const auto behind = detokenizer({token});
    const std::string text = behind->push(&token, 1);
    return text + behind->finish();
  }
  Utf8Decoder decoder;
  const std::string text = decoder.push(bytes_of(token));
  return text + decoder.finish();
}

std::string Tokenizer::bytes_of(Token token) const {
  if (!decoder_) return piece(token);
  const auto at = static_cast<std::size_t>(token);
  return at < spelling_.bytes.size() ? spelling_.bytes[at] : "";
}

std::unique_ptr<Detokenizer> Tokenizer::detokenizer(const std::vector<Token>& before) const {
  if (decoder_) {
    return std::make_unique<ByteDetokenizer>(spelling_, before);
  }
  if (library_ == nullptr) {
    return std::make_unique<NoDetokenizer>();
  }
  std::vector<Token> known;
  for (auto token = before.rbegin(); token != before.rend(); ++token) {
    if (known.size() < WindowDetokenizer::kContext && is_text(*token)) {
      known.insert(known.begin(), *token);
    }
  }
  return std::make_unique<WindowDetokenizer>(
      [this](const std::vector<Token>& ids) { return decode(ids); }, known,
      [this](Token token) { return is_text(token); });
}

}  // namespace specrt::native
