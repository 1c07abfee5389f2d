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

void expect(Json::Kind found, Json::Kind expected) {
  if (found != expected)
    throw std::runtime_error(std::string("found ") + name_of(found) + "; expected " +
                             name_of(expected));
}

}  // namespace

bool Json::boolean() const {
  expect(kind_, Kind::kBoolean);
  return boolean_;
}

std::int64_t Json::integer() const {
  expect(kind_, Kind::kInteger);
  return integer_;
}

double Json::number() const {
  if (kind_ != Kind::kInteger) expect(kind_, Kind::kNumber);
  return number_;
}

const std::string& Json::text() const {
  expect(kind_, Kind::kText);
  return text_;
}

const std::vector<Json>& Json::items() const {
  expect(kind_, Kind::kList);
  return items_;
}

const std::map<std::string, Json>& Json::fields() const {
  expect(kind_, Kind::kObject);
  return fields_;
}

const Json* Json::find(const std::string& name) const {
  const auto found = fields().find(name);
  return found == fields_.end() ? nullptr : &found->second;
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
