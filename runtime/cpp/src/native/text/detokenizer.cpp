#include "native/text/detokenizer.hpp"

#include <algorithm>
#include <utility>

namespace specrt::native {

namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

bool begins_with(std::string_view text, std::string_view begin) {
  return text.substr(0, begin.size()) == begin;
}

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

}  // namespace

std::string Utf8Decoder::push(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size() + 4);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const auto byte = static_cast<unsigned char>(bytes[i]);
    settle(text);
    // Python does not say that this is not UTF-8, but half of a surrogate pair, before it is whole.
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

ByteDetokenizer::ByteDetokenizer(const Spelling& spelling, const std::vector<Token>& before)
    : spelling_(spelling) {
  decoder_.push(joined(before.data(), before.size()));
  lost_ = Utf8Decoder(decoder_).finish();
}

std::string ByteDetokenizer::push(const Token* ids, std::size_t count) {
  return fresh(decoder_.push(joined(ids, count)));
}

std::string ByteDetokenizer::joined(const Token* ids, std::size_t count) {
  std::string data;
  for (std::size_t i = 0; i < count; ++i) {
    const auto token = static_cast<std::size_t>(ids[i]);
    if (token >= spelling_.bytes.size() || spelling_.bytes[token].empty()) {
      continue;
    }
    if (begun_) {
      data += spelling_.bytes[token];
      continue;
    }
    const std::string& own =
        spelling_.first.empty() ? spelling_.bytes[token] : spelling_.first[token];
    data += begins_with(own, spelling_.stripped) ? own.substr(spelling_.stripped.size()) : own;
    begun_ = true;
  }
  return data;
}

std::string ByteDetokenizer::fresh(std::string text) {
  if (text.empty()) {
    return text;
  }
  const std::string lost = std::exchange(lost_, std::string());
  return begins_with(text, lost) ? text.substr(lost.size()) : text;
}

namespace {

constexpr std::size_t kMostHeld = 8;  // tokens without whole text after which it is given out

bool begins_character(char byte) { return (static_cast<unsigned char>(byte) & 0xC0U) != 0x80U; }

std::size_t characters(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), begins_character));
}

// What follows the first so many characters.
std::string behind(const std::string& text, std::size_t count) {
  const auto begin = std::find_if(text.begin(), text.end(), [&count](char byte) {
    return begins_character(byte) && count-- == 0;
  });
  return {begin, text.end()};
}

}  // namespace

WindowDetokenizer::WindowDetokenizer(Decode decode, const std::vector<Token>& before,
                                     std::function<bool(Token)> is_text)
    : decode_(std::move(decode)), is_text_(std::move(is_text)), ids_(before) {
  shorten();
  given_ = decode_(ids_);
}

// Keep the last tokens in view.
void WindowDetokenizer::shorten() {
  const std::size_t out = ids_.size() - std::min(ids_.size(), kContext);
  ids_.erase(ids_.begin(), ids_.begin() + static_cast<std::ptrdiff_t>(out));
}

std::string WindowDetokenizer::push(const Token* ids, std::size_t count) {
  std::string fresh;
  for (std::size_t i = 0; i < count; ++i) {
    if (!is_text_(ids[i])) {
      continue;
    }
    ids_.push_back(ids[i]);
    ++held_;
    const std::string text = decode_(ids_);
    const bool is_whole =
        characters(text) > characters(seen(text)) && !ends_with(text, kReplacement);
    if (is_whole || held_ >= kMostHeld) {
      fresh += give(text);
    }
  }
  return fresh;
}

std::string WindowDetokenizer::finish() { return held_ == 0 ? "" : give(decode_(ids_)); }

std::string WindowDetokenizer::give(const std::string& text) {
  const std::string fresh = behind(text, characters(seen(text)));
  shorten();
  given_ = decode_(ids_);
  held_ = 0;
  return fresh;
}

// What was given out of a text, without half a character that is whole now.
std::string WindowDetokenizer::seen(const std::string& text) const {
  std::string seen = given_;
  while (!begins_with(text, seen) && ends_with(seen, kReplacement)) {
    seen.resize(seen.size() - kReplacement.size());
  }
  return seen;
}

StopStrings::StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)) {
  std::sort(stops_.begin(), stops_.end());
}

StopStrings::Shown StopStrings::push(const std::string& text) {
  const std::size_t known = held_.size();
  held_ += text;
  const std::string* met = nullptr;
  std::size_t end = 0;  // of the text before it
  for (std::size_t at = known; at < held_.size(); ++at) {
    if (met == nullptr) begun_.push_back({at, stops_.begin(), stops_.end()});
    const std::string* const stop = meet(held_[at], at);
    if (stop == nullptr) continue;
    met = stop;
    end = at + 1 - stop->size();
  }
  if (met != nullptr) {
    Shown shown{held_.substr(0, end), *met};
    held_.clear();
    begun_.clear();
    return shown;
  }
  const std::size_t keep = begun_.empty() ? held_.size() : begun_.front().place;
  Shown shown{held_.substr(0, keep), std::nullopt};
  held_.erase(0, keep);
  for (Begun& one : begun_) one.place -= keep;
  return shown;
}

// Keep what goes on with a byte. Return the stop string that ends with it, of several the one that
// begins first: what begins later can no longer be the first, and is left.
const std::string* StopStrings::meet(char byte, std::size_t at) {
  auto kept = begun_.begin();
  for (const Begun& one : begun_) {
    const std::size_t depth = at - one.place;
    const auto below = [&](const std::string& stop) {
      return static_cast<unsigned char>(stop[depth]) < static_cast<unsigned char>(byte);
    };
    const auto same = [&](const std::string& stop) { return stop[depth] == byte; };
    const Stop first = std::partition_point(one.first, one.last, below);
    const Stop last = std::partition_point(first, one.last, same);
    if (first == last) continue;
    if (first->size() == depth + 1) {  // the shortest sorts first
      begun_.erase(kept, begun_.end());
      return &*first;
    }
    *kept++ = {one.place, first, last};
  }
  begun_.erase(kept, begun_.end());
  return nullptr;
}

std::string StopStrings::finish() {
  begun_.clear();
  return std::exchange(held_, std::string());
}

}  // namespace specrt::native
