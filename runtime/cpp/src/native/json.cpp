#include "native/json.hpp"

#include <stdexcept>

#include "native/json_utf8.hpp"

namespace specrt::native {

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

[[noreturn]] void refuse(Json::Kind found, Json::Kind expected) {
  throw std::runtime_error(std::string("found ") + name_of(found) + "; expected " +
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
  const auto found = fields().find(name);
  return found == fields().end() ? nullptr : &found->second;
}

const Json& Json::at(const std::string& name) const {
  if (const Json* value = find(name)) return *value;
  throw std::runtime_error("the field " + quoted(name) + " is missing; expected it");
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

}  // namespace specrt::native
