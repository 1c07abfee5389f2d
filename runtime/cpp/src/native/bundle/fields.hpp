// Typed access to the fields of a JSON record; an error names the field and what was expected.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "native/text/json.hpp"

namespace specrt::native {

constexpr std::int64_t kMostWhole = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMostCount = 1'000'000'000;  // of something that must be there

// A value as a message shows it: one line, and not too long.
std::string shown(const Json& value);
std::string shown(const std::string& text);
std::string shown(const std::vector<std::int64_t>& numbers);

// One record. Every reader throws std::runtime_error naming the field and what was expected.
class Fields {
 public:
  // `name` is the record's place, empty for the outermost.
  Fields(const Json& value, std::string name);

  std::int64_t whole(const std::string& key, std::int64_t first = 0,
                     std::int64_t last = kMostWhole) const;
  std::int64_t count(const std::string& key) const { return whole(key, 1, kMostCount); }
  std::optional<std::int64_t> whole_or_null(const std::string& key) const;
  std::vector<std::int64_t> wholes(const std::string& key) const;
  double number(const std::string& key) const;  // finite, 0 or more
  std::vector<double> numbers(const std::string& key) const;
  bool boolean(const std::string& key) const;
  std::string text(const std::string& key) const;
  std::map<std::string, std::string> texts(const std::string& key) const;
  Fields record(const std::string& key) const;
  std::optional<Fields> record_or_null(const std::string& key) const;
  std::vector<Fields> records(const std::string& key) const;
  // What an object of records holds, by name.
  std::map<std::string, Fields> named(const std::string& key) const;

  bool has(const std::string& key) const { return value_->find(key) != nullptr; }
  // Refuse keys that there are not.
  void only(std::initializer_list<std::string_view> known) const;
  // How messages name a field.
  std::string place(const std::string& key) const {
    return name_.empty() ? key : name_ + "." + key;
  }

 private:
  const Json& at(const std::string& key) const;

  const Json* value_;
  std::string name_;
};

// A text of a record: up to 255 printable characters.
bool is_plain(std::string_view text);

}  // namespace specrt::native
