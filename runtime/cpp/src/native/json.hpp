// JSON as RFC 8259 has it: a value, a strict reader, and a writer of texts.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace specrt::native {

// A value. Reading one as another kind throws std::runtime_error, which says what was expected.
class Json {
 public:
  enum class Kind { kNull, kBoolean, kInteger, kNumber, kText, kList, kObject };

  // Throws std::runtime_error with the byte where it went wrong. No duplicate keys, no trailing
  // text, no more than 64 levels.
  static Json parse(std::string_view text);

  Kind kind() const { return kind_; }
  bool is_null() const { return kind_ == Kind::kNull; }
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
  Kind kind_ = Kind::kNull;
  bool boolean_ = false;
  std::int64_t integer_ = 0;
  double number_ = 0;
  std::string text_;
  std::vector<Json> items_;
  std::map<std::string, Json> fields_;
};

// A text as a JSON string, quotes included; bytes that are no UTF-8 become U+FFFD.
std::string quoted(std::string_view text);

}  // namespace specrt::native
