// Values read from JSON, and written as JSON.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "native/text/json.hpp"

namespace specrt::checks {

using native::Json;

inline void read(const Json& value, bool& into) { into = value.boolean(); }
inline void read(const Json& value, std::string& into) { into = value.text(); }

// A number, or a text for one that JSON does not know: "inf", "-inf", "nan", and large ones.
template <typename T>
std::enable_if_t<std::is_arithmetic_v<T>> read(const Json& value, T& into) {
  const char* const text = value.kind() == Json::Kind::kText ? value.text().c_str() : nullptr;
  if constexpr (std::is_floating_point_v<T>) {
    into = static_cast<T>(text ? std::strtod(text, nullptr) : value.number());
  } else {
    into =
        text ? static_cast<T>(std::strtoull(text, nullptr, 10)) : static_cast<T>(value.integer());
  }
}

template <typename A, typename B>
void read(const Json& value, std::pair<A, B>& into) {
  read(value.items().at(0), into.first);
  read(value.items().at(1), into.second);
}

template <typename T>
void read(const Json& values, std::vector<T>& into) {
  for (const Json& value : values.items()) read(value, into.emplace_back());
}

template <typename T>
T get(const Json& call, const char* name) {
  T value{};
  read(call.at(name), value);
  return value;
}

inline std::string json(const std::string& text) { return native::quoted(text); }

template <typename T>
std::enable_if_t<std::is_arithmetic_v<T>, std::string> json(T value) {
  if constexpr (std::is_same_v<T, bool>) return value ? "true" : "false";
  if constexpr (std::is_integral_v<T>) return std::to_string(value);
  const auto number = static_cast<double>(value);
  if (std::isnan(number)) return "\"nan\"";
  if (std::isinf(number)) return number > 0 ? "\"inf\"" : "\"-inf\"";
  char digits[40];
  std::snprintf(digits, sizeof digits, "%.17g", number);
  return digits;
}

template <typename T>
std::string json(const std::optional<T>& value) {
  return value ? json(*value) : "null";
}

template <typename T>
std::string json(const std::vector<T>& values) {
  std::string text;
  for (const T& value : values) text += (text.empty() ? "" : ", ") + json(value);
  return "[" + text + "]";
}

// Of answers that are JSON already.
inline std::string list(const std::vector<std::string>& answers) {
  std::string text;
  for (const std::string& answer : answers) text += (text.empty() ? "" : ",") + answer;
  return "[" + text + "]";
}

inline std::string object(const std::vector<std::pair<std::string, std::string>>& fields) {
  std::string text;
  for (const auto& [name, answer] : fields)
    text += (text.empty() ? "" : ",") + json(name) + ":" + answer;
  return "{" + text + "}";
}

}  // namespace specrt::checks
