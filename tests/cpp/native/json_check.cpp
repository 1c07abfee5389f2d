// Texts that Python reads or refuses as JSON.
#include <stdexcept>

#include "native/check.hpp"

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

}  // namespace

static const Registered kRegistered("json", check_json);

}  // namespace specrt::checks
