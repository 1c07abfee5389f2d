#include "abi/text.hpp"

#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "abi/arguments.hpp"

namespace specrt::abi {

namespace {

constexpr std::size_t kLongestShown = 200;

bool continues(unsigned char byte) { return (byte & 0xC0u) == 0x80u; }

// The length of the character that begins here; 0 where none does. No overlong form, no surrogate,
// nothing beyond U+10FFFF.
std::size_t character_length(const unsigned char* at, std::size_t left) {
  const unsigned char lead = at[0];
  if (lead < 0x80) return 1;
  const std::size_t length = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  if (length == 0 || lead > 0xF4 || length > left) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if (!continues(at[i])) return 0;
  }
  if ((lead == 0xE0 && at[1] < 0xA0) || (lead == 0xED && at[1] > 0x9F)) return 0;
  if ((lead == 0xF0 && at[1] < 0x90) || (lead == 0xF4 && at[1] > 0x8F)) return 0;
  return length;
}

}  // namespace

std::size_t invalid_utf8(std::string_view text) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = character_length(bytes + at, text.size() - at);
    if (length == 0) return at;
    at += length;
  }
  return std::string_view::npos;
}

std::string checked_text(const char* name, const char* text, std::size_t bytes) {
  require(text, name);
  require_count(name, bytes, 1);
  std::string copy(text, bytes);
  const std::size_t wrong = invalid_utf8(copy);
  if (wrong != std::string_view::npos) {
    invalid(std::string(name) + " is not UTF-8 at byte " + std::to_string(wrong) +
            "; pass text encoded as UTF-8");
  }
  return copy;
}

std::string checked_text(const char* name, const char* text) {
  require(text, name);
  return checked_text(name, text, std::strlen(text));
}

std::string checked_words(const std::string& name, std::string text) {
  const std::size_t zero = text.find('\0');
  if (zero != std::string::npos) {
    invalid(name + " holds a zero byte at " + std::to_string(zero) +
            "; leave it out, or give token ids");
  }
  return text;
}

std::size_t characters(std::string_view text) {
  std::size_t count = 0;
  for (const char byte : text) count += !continues(static_cast<unsigned char>(byte));
  return count;
}

std::size_t whole_prefix(std::string_view text, std::size_t most) noexcept {
  if (most >= text.size()) return text.size();
  while (most > 0 && continues(static_cast<unsigned char>(text[most]))) --most;
  return most;
}

std::string quoted(std::string_view text) {
  const std::size_t size = whole_prefix(text, kLongestShown);
  std::string out = "'";
  for (const char byte : text.substr(0, size)) {
    const auto value = static_cast<unsigned char>(byte);
    out += value < 0x20 || value == 0x7F ? '?' : byte;
  }
  return out + (size < text.size() ? "...'" : "'");
}

std::string shown(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char digits[32];
  const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
  std::string text(digits, end);
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

}  // namespace specrt::abi
