#include "native/utf8.hpp"

#include <utility>

namespace specrt::native {

namespace {

constexpr const char* kReplacement = "\xEF\xBF\xBD";

}  // namespace

std::string Utf8Decoder::push(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size() + 4);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const auto byte = static_cast<unsigned char>(bytes[i]);
    settle(text);
    // Python does not say that this is no UTF-8, but half of a surrogate pair, before it is whole.
    if (held_ == "\xED" && byte > high_ && byte < 0xC0 && i + 1 == bytes.size()) {
      late_ = byte;
    } else {
      take(byte, text);
    }
  }
  return text;
}

std::string Utf8Decoder::finish() {
  std::string text;
  settle(text);
  text += missing_ > 0 ? kReplacement : "";
  held_.clear();
  missing_ = 0;
  return text;
}

// Look at the byte that was left for later.
void Utf8Decoder::settle(std::string& text) {
  const int byte = std::exchange(late_, -1);
  if (byte >= 0) {
    take(static_cast<unsigned char>(byte), text);
  }
}

void Utf8Decoder::take(unsigned char byte, std::string& text) {
  if (missing_ > 0) {
    if (byte >= low_ && byte <= high_) {
      held_.push_back(static_cast<char>(byte));
      low_ = 0x80;
      high_ = 0xBF;
      if (--missing_ == 0) {
        text += held_;
        held_.clear();
      }
      return;
    }
    text += kReplacement;  // and this byte begins anew
    held_.clear();
    missing_ = 0;
  }
  low_ = 0x80;
  high_ = 0xBF;
  if (byte < 0x80) {
    text.push_back(static_cast<char>(byte));
  } else if (byte < 0xC2 || byte > 0xF4) {
    text += kReplacement;
  } else {
    held_.assign(1, static_cast<char>(byte));
    missing_ = byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
    // No overlong forms, no halves of surrogate pairs, nothing above U+10FFFF.
    if (byte == 0xE0) low_ = 0xA0;
    if (byte == 0xED) high_ = 0x9F;
    if (byte == 0xF0) low_ = 0x90;
    if (byte == 0xF4) high_ = 0x8F;
  }
}

bool is_utf8(std::string_view text) {
  Utf8Decoder decoder;
  return decoder.push(text) == text && decoder.finish().empty();
}

}  // namespace specrt::native
