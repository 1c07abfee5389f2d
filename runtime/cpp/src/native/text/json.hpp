// JSON (RFC 8259): a value, a strict reader, and a writer of texts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace specrt::native {

// One character: how many bytes it has, or how many to pass over where it is none.
struct Character {
  std::size_t bytes;
  bool valid;
};

Character character(std::string_view text, std::size_t at);
void append_utf8(std::string& text, unsigned code);

// A value. Reading one as another kind throws std::runtime_error, which says what was expected.
class Json {
 public:
  enum class Kind { kNull, kBoolean, kInteger, kNumber, kText, kList, kObject };

  // Throws std::runtime_error with the byte where it went wrong. No duplicate keys, no trailing
  // text, no more than 64 levels.
  static Json parse(std::string_view text);

  Json() = default;

  Kind kind() const { return static_cast<Kind>(value_.index()); }
  bool is_null() const { return kind() == Kind::kNull; }
  bool boolean() const;
  std::int64_t integer() const;  // a number without fraction or exponent
  double number() const;         // of integers, too
  const std::string& text() const;
  const std::vector<Json>& items() const;
  const std::map<std::string, Json>& fields() const;
  const Json* find(const std::string& name) const;  // nullptr where there is none
  const Json& at(const std::string& name) const;    // throws where there is none

 private:
  friend class JsonReader;
  using Items = std::vector<Json>;
  using Fields = std::map<std::string, Json>;
  template <typename T>
  explicit Json(T value) : value_(std::move(value)) {}
  template <typename T>
  const T& as() const;

  // In the order of the kinds. Vocabularies have hundreds of thousands of values.
  std::variant<std::monostate, bool, std::int64_t, double, std::string, Items, Fields> value_;
};

// A text as a JSON string, quotes included; bytes that are not UTF-8 become U+FFFD.
std::string quoted(std::string_view text);

// A number with so many digits after the point, and with all that there are to a double where none
// are given.
std::string decimal(double value, int digits = 0);

}  // namespace specrt::native
