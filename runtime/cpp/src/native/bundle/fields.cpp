#include "native/bundle/fields.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace specrt::native {

namespace {

constexpr std::size_t kMostShown = 40, kLongest = 255;

[[noreturn]] void refuse(const std::string& place, const std::string& result,
                         const std::string& expected) {
  throw std::runtime_error(place + " is " + result + "; expected " + expected);
}

std::string listed(const std::vector<std::string>& parts, char open, char close) {
  std::string text(1, open);
  for (std::size_t i = 0; i < std::min<std::size_t>(parts.size(), 6); ++i)
    text += (i ? ", " : "") + parts[i];
  return text + (parts.size() > 6 ? ", ..." : "") + close;
}

// What no terminal shows as a character: controls, marks of direction, odd spaces, private use.
bool is_printable(unsigned code) {
  constexpr std::pair<unsigned, unsigned> kNone[] = {
      {0x00, 0x1F},     {0x7F, 0xA0},     {0xAD, 0xAD},     {0x1680, 0x1680},
      {0x2000, 0x200F}, {0x2028, 0x202F}, {0x205F, 0x206F}, {0x3000, 0x3000},
      {0xE000, 0xF8FF}, {0xFEFF, 0xFEFF}, {0xFFFE, 0xFFFF}, {0xF0000, 0x10FFFF}};
  return std::none_of(std::begin(kNone), std::end(kNone), [code](const auto& range) {
    return range.first <= code && code <= range.second;
  });
}

double number_of(const Json& value, const std::string& place) {
  const bool is_number =
      value.kind() == Json::Kind::kInteger || value.kind() == Json::Kind::kNumber;
  if (is_number && std::isfinite(value.number()) && value.number() >= 0) return value.number();
  refuse(place, shown(value), "a finite number, 0 or more");
}

std::int64_t whole_of(const Json& value, const std::string& place, std::int64_t first,
                      std::int64_t last) {
  if (value.kind() == Json::Kind::kInteger && first <= value.integer() && value.integer() <= last)
    return value.integer();
  refuse(place, shown(value),
         "a whole number from " + std::to_string(first) + " to " + std::to_string(last));
}

std::string text_of(const Json& value, const std::string& place) {
  if (value.kind() == Json::Kind::kText && is_plain(value.text())) return value.text();
  refuse(place, shown(value), "up to 255 printable characters");
}

const std::vector<Json>& list_of(const Json& value, const std::string& place) {
  if (value.kind() != Json::Kind::kList) refuse(place, shown(value), "a list");
  return value.items();
}

}  // namespace

bool is_plain(std::string_view text) {
  std::size_t characters = 0;
  for (std::size_t at = 0; at < text.size(); ++characters) {
    const unsigned first = static_cast<unsigned char>(text[at]);
    const std::size_t bytes = first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    unsigned code = bytes == 1 ? first : first & (0xFFu >> (bytes + 1));
    if (text.size() - at < bytes) return false;
    for (std::size_t i = 1; i < bytes; ++i)
      code = code << 6 | (static_cast<unsigned char>(text[at + i]) & 0x3Fu);
    if (!is_printable(code)) return false;
    at += bytes;
  }
  return characters <= kLongest;
}

std::string shown(const std::string& text) {
  std::string begin = text.substr(0, kMostShown);
  while (begin.size() < text.size() && !begin.empty() && (text[begin.size()] & 0xC0) == 0x80)
    begin.pop_back();  // no half of a character
  return quoted(begin) + (begin.size() < text.size() ? "..." : "");
}

std::string shown(const std::vector<std::int64_t>& numbers) {
  std::vector<std::string> parts;
  for (const std::int64_t number : numbers) parts.push_back(std::to_string(number));
  return listed(parts, '(', ')');
}

std::string shown(const Json& value) {
  std::vector<std::string> parts;
  switch (value.kind()) {
    case Json::Kind::kNull:
      return "null";
    case Json::Kind::kBoolean:
      return value.boolean() ? "true" : "false";
    case Json::Kind::kInteger:
      return std::to_string(value.integer());
    case Json::Kind::kNumber:
      return decimal(value.number());
    case Json::Kind::kText:
      return shown(value.text());
    case Json::Kind::kList:
      if (value.items().empty()) return "[]";
      return "a list of " + std::to_string(value.items().size());
    case Json::Kind::kObject:
      for (const auto& [name, item] : value.fields()) parts.push_back(shown(name));
      return parts.empty() ? "{}" : "an object with " + listed(parts, '{', '}');
  }
  return "nothing";
}

Fields::Fields(const Json& value, std::string name) : value_(&value), name_(std::move(name)) {
  if (value.kind() != Json::Kind::kObject) refuse(name_, shown(value), "an object");
}

const Json& Fields::at(const std::string& key) const {
  if (const Json* entry = value_->find(key)) return *entry;
  throw std::runtime_error(place(key) + " is missing");
}

void Fields::only(std::initializer_list<std::string_view> known) const {
  for (const auto& [key, value] : value_->fields()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    std::string all;
    for (const std::string_view one : known) (all += all.empty() ? "" : ", ") += one;
    throw std::runtime_error(name_ + " has an unknown key " + shown(key) + "; known: " + all);
  }
}

std::int64_t Fields::whole(const std::string& key, std::int64_t first, std::int64_t last) const {
  return whole_of(at(key), place(key), first, last);
}

std::optional<std::int64_t> Fields::whole_or_null(const std::string& key) const {
  if (at(key).is_null()) return std::nullopt;
  return whole(key);
}

std::vector<std::int64_t> Fields::wholes(const std::string& key) const {
  std::vector<std::int64_t> result;
  for (const Json& item : list_of(at(key), place(key)))
    result.push_back(
        whole_of(item, place(key) + "[" + std::to_string(result.size()) + "]", 0, kMostWhole));
  return result;
}

double Fields::number(const std::string& key) const { return number_of(at(key), place(key)); }

std::vector<double> Fields::numbers(const std::string& key) const {
  std::vector<double> result;
  for (const Json& item : list_of(at(key), place(key)))
    result.push_back(number_of(item, place(key) + "[" + std::to_string(result.size()) + "]"));
  return result;
}

bool Fields::boolean(const std::string& key) const {
  if (at(key).kind() != Json::Kind::kBoolean) refuse(place(key), shown(at(key)), "true or false");
  return at(key).boolean();
}

std::string Fields::text(const std::string& key) const { return text_of(at(key), place(key)); }

std::map<std::string, std::string> Fields::texts(const std::string& key) const {
  std::map<std::string, std::string> result;
  const Fields inside(at(key), place(key));
  for (const auto& [name, value] : inside.value_->fields()) {
    if (!is_plain(name))
      refuse("a key of " + place(key), shown(name), "up to 255 printable characters");
    result[name] = text_of(value, place(key) + "[" + shown(name) + "]");
  }
  return result;
}

Fields Fields::record(const std::string& key) const { return Fields(at(key), place(key)); }

std::optional<Fields> Fields::record_or_null(const std::string& key) const {
  if (at(key).is_null()) return std::nullopt;
  return record(key);
}

std::vector<Fields> Fields::records(const std::string& key) const {
  std::vector<Fields> result;
  for (const Json& item : list_of(at(key), place(key)))
    result.emplace_back(item, place(key) + "[" + std::to_string(result.size()) + "]");
  return result;
}

std::map<std::string, Fields> Fields::named(const std::string& key) const {
  std::map<std::string, Fields> result;
  const Fields inside(at(key), place(key));
  for (const auto& [name, value] : inside.value_->fields()) {
    if (!is_plain(name))
      refuse("a key of " + place(key), shown(name), "up to 255 printable characters");
    result.emplace(name, Fields(value, place(key) + "[" + shown(name) + "]"));
  }
  return result;
}

}  // namespace specrt::native
