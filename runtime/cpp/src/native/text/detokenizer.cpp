#include "native/text/detokenizer.hpp"

#include <algorithm>
#include <utility>

namespace specrt::native {

namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

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
  if (missing_ > 0) text += kReplacement;
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

namespace {

bool ends_with(const std::string& text, std::string_view end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Characters of a UTF-8 text.
std::size_t characters(const std::string& text) {
  std::size_t count = 0;
  for (const char byte : text) {
    count += (static_cast<unsigned char>(byte) & 0xC0U) != 0x80U;
  }
  return count;
}

// What follows the first so many characters.
std::string behind(const std::string& text, std::size_t count) {
  std::size_t at = 0;
  for (; at < text.size(); ++at) {
    if ((static_cast<unsigned char>(text[at]) & 0xC0U) != 0x80U && count-- == 0) {
      break;
    }
  }
  return text.substr(at);
}

}  // namespace

std::string ByteDetokenizer::push(const Token* ids, std::size_t count) {
  std::string data;
  for (std::size_t i = 0; i < count; ++i) {
    const auto token = static_cast<std::size_t>(ids[i]);
    if (token < bytes_.size()) {
      data += bytes_[token];
    }
  }
  return decoder_.push(data);
}

std::string RedecodingDetokenizer::push(const Token* ids, std::size_t count) {
  ids_.insert(ids_.end(), ids, ids + count);
  const std::string text = decode_(ids_);
  if (ends_with(text, kReplacement) || characters(text) <= characters(given_text_)) {
    return "";
  }
  return give(text);
}

std::string RedecodingDetokenizer::finish() { return give(decode_(ids_)); }

std::string RedecodingDetokenizer::give(const std::string& text) {
  const std::string fresh = behind(text, characters(given_text_));
  // The next window starts at the tokens just given, so that a decoder has their context.
  ids_.erase(ids_.begin(), ids_.begin() + static_cast<std::ptrdiff_t>(given_));
  given_ = ids_.size();
  given_text_ = decode_(ids_);
  return fresh;
}

namespace {

// The length of the longest end of a text that begins the stop string, and is not all of it. Both
// are whole characters, so that what is cut is, too.
std::size_t overlap(const std::string& text, const std::string& stop) {
  std::size_t length = std::min(text.size(), stop.size() - 1);
  while (length > 0 && text.compare(text.size() - length, length, stop, 0, length) != 0) {
    --length;
  }
  return length;
}

}  // namespace

StopStrings::Shown StopStrings::push(const std::string& text) {
  if (stops_.empty()) {
    return {text, std::nullopt};
  }
  held_ += text;
  const std::string* met = nullptr;
  std::size_t first = std::string::npos;
  for (const std::string& stop : stops_) {
    const std::size_t at = held_.find(stop);
    if (at < first || (at == first && met != nullptr && stop < *met)) {
      first = at;
      met = &stop;
    }
  }
  if (met != nullptr) {
    Shown shown{held_.substr(0, first), *met};
    held_.clear();
    return shown;
  }
  std::size_t keep = 0;
  for (const std::string& stop : stops_) {
    keep = std::max(keep, overlap(held_, stop));
  }
  Shown shown{held_.substr(0, held_.size() - keep), std::nullopt};
  held_.erase(0, held_.size() - keep);
  return shown;
}

std::string StopStrings::finish() { return std::exchange(held_, std::string()); }

}  // namespace specrt::native
