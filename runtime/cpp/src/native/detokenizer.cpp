#include "native/detokenizer.hpp"

namespace specrt::native {

namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

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

std::string AskingDetokenizer::push(const Token* ids, std::size_t count) {
  ids_.insert(ids_.end(), ids, ids + count);
  const std::string text = decode_(ids_);
  if (ends_with(text, kReplacement) || characters(text) <= characters(given_text_)) {
    return "";
  }
  return give(text);
}

std::string AskingDetokenizer::finish() { return give(decode_(ids_)); }

std::string AskingDetokenizer::give(const std::string& text) {
  const std::string fresh = behind(text, characters(given_text_));
  // The next window starts at the tokens just given, so that a decoder has their context.
  ids_.erase(ids_.begin(), ids_.begin() + static_cast<std::ptrdiff_t>(given_));
  given_ = ids_.size();
  given_text_ = decode_(ids_);
  return fresh;
}

}  // namespace specrt::native
