#include "native/text/json.hpp"

#include <limits>
#include <locale>
#include <sstream>
#include <stdexcept>

namespace specrt::native {

Character character(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) -> unsigned {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0;
  };
  const unsigned first = byte(at);
  if (first < 0x80) return {1, true};
  const std::size_t count = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4) return {1, false};
  // The second byte rules out spellings that are too long, surrogates, and what is above U+10FFFF.
  const unsigned low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const unsigned high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  if (byte(at + 1) < low || byte(at + 1) > high) return {1, false};
  for (std::size_t i = 2; i < count; ++i)
    if ((byte(at + i) & 0xC0) != 0x80) return {i, false};
  return {count, true};
}

void append_utf8(std::string& text, unsigned code) {
  const auto add = [&](unsigned byte) { text.push_back(static_cast<char>(byte)); };
  if (code < 0x80) return add(code);
  if (code < 0x800) {
    add(0xC0 | code >> 6);
  } else {
    if (code < 0x10000) {
      add(0xE0 | code >> 12);
    } else {
      add(0xF0 | code >> 18);
      add(0x80 | (code >> 12 & 0x3F));
    }
    add(0x80 | (code >> 6 & 0x3F));
  }
  add(0x80 | (code & 0x3F));
}

namespace {

constexpr int kMostLevels = 64;

}  // namespace

class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {
    stream_.imbue(std::locale::classic());  // the application's may write numbers with commas
  }

  Json document() {
    Json value = read(1);
    skip_space();
    if (at_ < text_.size()) fail("text after the value; expected its end");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("byte " + std::to_string(at_) + ": " + what);
  }

  int peek() const { return at_ < text_.size() ? static_cast<unsigned char>(text_[at_]) : -1; }

  bool take(char expected) {
    if (peek() != expected) return false;
    ++at_;
    return true;
  }

  void skip_space() {
    while (at_ < text_.size() && std::string_view(" \t\n\r").find(text_[at_]) != text_.npos) ++at_;
  }

  Json read(int level) {
    if (level > kMostLevels) fail("more than " + std::to_string(kMostLevels) + " levels");
    skip_space();
    switch (peek()) {
      case '{':
        return read_fields(level);
      case '[':
        return read_items(level);
      case '"':
        return Json(read_text());
      case 't':
        read_word("true");
        return Json(true);
      case 'f':
        read_word("false");
        return Json(false);
      case 'n':
        read_word("null");
        return Json();
      default:
        return read_number();
    }
  }

  void read_word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) fail("expected " + std::string(word));
    at_ += word.size();
  }

  Json read_items(int level) {
    std::vector<Json> items;
    ++at_;
    skip_space();
    if (take(']')) return Json(std::move(items));
    do {
      items.push_back(read(level + 1));
      skip_space();
    } while (take(','));
    if (!take(']')) fail("expected , or ]");
    return Json(std::move(items));
  }

  Json read_fields(int level) {
    std::map<std::string, Json> fields;
    ++at_;
    skip_space();
    if (take('}')) return Json(std::move(fields));
    do {
      skip_space();
      if (peek() != '"') fail("expected the name of a field, in double quotes");
      const std::size_t begin = at_;
      std::string name = read_text();
      skip_space();
      if (!take(':')) fail("expected :");
      Json value = read(level + 1);
      const auto [place, is_new] = fields.emplace(std::move(name), std::move(value));
      if (!is_new) {
        at_ = begin;
        fail("the field " + native::quoted(place->first) +
             " is there twice; expected one of a name");
      }
      skip_space();
    } while (take(','));
    if (!take('}')) fail("expected , or }");
    return Json(std::move(fields));
  }

  std::string read_text() {
    ++at_;
    std::string result;
    while (!take('"')) {
      const int next = peek();
      if (next < 0) fail("the text has no end; expected \"");
      if (next < 0x20) fail("a control character in a text; expected it escaped");
      if (take('\\')) {
        read_escape(result);
        continue;
      }
      const Character one = character(text_, at_);
      if (!one.valid) fail("bytes that are not UTF-8");
      result.append(text_.substr(at_, one.bytes));
      at_ += one.bytes;
    }
    return result;
  }

  void read_escape(std::string& result) {
    constexpr std::string_view kNames = "\"\\/bfnrt", kMeant = "\"\\/\b\f\n\r\t";
    if (take('u')) {
      unsigned code = read_hex();
      if (code >= 0xD800 && code < 0xDC00 && text_.substr(at_, 2) == "\\u") {
        at_ += 2;
        const unsigned low = read_hex();
        if (low < 0xDC00 || low > 0xDFFF) fail("half of a surrogate pair; expected the other half");
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
      }
      if (code >= 0xD800 && code < 0xE000) fail("half of a surrogate pair; expected both");
      return append_utf8(result, code);
    }
    const std::size_t which = at_ < text_.size() ? kNames.find(text_[at_]) : std::string_view::npos;
    if (which == kNames.npos) fail("an escape that there is not; expected one of \\\"/bfnrtu");
    result.push_back(kMeant[which]);
    ++at_;
  }

  unsigned read_hex() {
    unsigned code = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const int digit = peek();
      if (digit >= '0' && digit <= '9') {
        code = code * 16 + static_cast<unsigned>(digit - '0');
      } else if ((digit | 0x20) >= 'a' && (digit | 0x20) <= 'f' && digit > 0) {
        code = code * 16 + static_cast<unsigned>((digit | 0x20) - 'a') + 10;
      } else {
        fail("expected four hexadecimal digits");
      }
    }
    return code;
  }

  bool skip_digits() {
    const std::size_t begin = at_;
    while (peek() >= '0' && peek() <= '9') ++at_;
    return at_ > begin;
  }

  Json read_number() {
    const std::size_t begin = at_;
    take('-');
    if (!take('0') && !skip_digits()) fail("expected a value");
    const std::size_t whole = at_;
    if (take('.') && !skip_digits()) fail("expected a digit after the point");
    if (take('e') || take('E')) {
      if (!take('-')) take('+');
      if (!skip_digits()) fail("expected a digit of the exponent");
    }
    const std::string_view written = text_.substr(begin, at_ - begin);
    std::int64_t integer = 0;
    if (at_ == whole && to_integer(written, integer)) return Json(integer);
    double number = 0;
    stream_.clear();
    stream_.str(std::string(written));
    if (!(stream_ >> number)) fail("a number too large to hold");
    return Json(number);
  }

  // Digits that fit; what does not is a number like those with a fraction.
  static bool to_integer(std::string_view written, std::int64_t& value) {
    const bool negative = written[0] == '-';
    constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
    std::int64_t sum = 0;  // below zero, where there is one more
    for (const char c : written.substr(negative ? 1 : 0)) {
      const std::int64_t digit = c - '0';
      if (sum < (kLeast + digit) / 10) return false;
      sum = sum * 10 - digit;
    }
    if (!negative && sum == kLeast) return false;
    value = negative ? sum : -sum;
    return true;
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::istringstream stream_;
};

Json Json::parse(std::string_view text) { return JsonReader(text).document(); }

namespace {

const char* name_of(Json::Kind kind) {
  switch (kind) {
    case Json::Kind::kNull:
      return "null";
    case Json::Kind::kBoolean:
      return "true or false";
    case Json::Kind::kInteger:
      return "a whole number";
    case Json::Kind::kNumber:
      return "a number";
    case Json::Kind::kText:
      return "a text";
    case Json::Kind::kList:
      return "a list";
    case Json::Kind::kObject:
      return "an object";
  }
  return "nothing";
}

[[noreturn]] void refuse(Json::Kind actual, Json::Kind expected) {
  throw std::runtime_error(std::string("found ") + name_of(actual) + "; expected " +
                           name_of(expected));
}

}  // namespace

template <typename T>
const T& Json::as() const {
  if (const T* const value = std::get_if<T>(&value_)) return *value;
  refuse(kind(), Json{T{}}.kind());
}

bool Json::boolean() const { return as<bool>(); }

std::int64_t Json::integer() const { return as<std::int64_t>(); }

double Json::number() const {
  if (kind() == Kind::kInteger) return static_cast<double>(integer());
  return as<double>();
}

const std::string& Json::text() const { return as<std::string>(); }

const std::vector<Json>& Json::items() const { return as<Items>(); }

const std::map<std::string, Json>& Json::fields() const { return as<Fields>(); }

const Json* Json::find(const std::string& name) const {
  const auto entry = fields().find(name);
  return entry == fields().end() ? nullptr : &entry->second;
}

const Json& Json::at(const std::string& name) const {
  if (const Json* value = find(name)) return *value;
  throw std::runtime_error("the field " + native::quoted(name) + " is missing; expected it");
}

std::string quoted(std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string result = "\"";
  for (std::size_t at = 0; at < text.size();) {
    const Character one = character(text, at);
    const unsigned code = static_cast<unsigned char>(text[at]);
    if (!one.valid) {
      result += "\xEF\xBF\xBD";
    } else if (code < 0x20) {
      result += "\\u00";
      result += kHex[code >> 4];
      result += kHex[code & 15];
    } else {
      if (code == '"' || code == '\\') result += '\\';
      result.append(text.substr(at, one.bytes));
    }
    at += one.bytes;
  }
  return result + '"';
}

std::string decimal(double value, int digits) {
  std::ostringstream text;
  text.imbue(std::locale::classic());  // the application's may write numbers with commas
  if (digits > 0) {
    text.setf(std::ios::fixed);
    text.precision(digits);
  } else {
    text.precision(std::numeric_limits<double>::max_digits10);
  }
  text << value;
  return text.str();
}

}  // namespace specrt::native
