#include "native/text/decoder.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <utility>

namespace specrt::native {

namespace {

// The byte that each code point of a byte-level vocabulary stands for, -1 for others: printable
// bytes stand for themselves, the others for the code points from 256 on, in order (Radford et al.
// 2019).
std::array<int, 512> byte_symbols() {
  std::array<int, 512> symbols{};
  symbols.fill(-1);
  std::size_t next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 33 && byte < 127) || (byte >= 161 && byte != 173);
    symbols[printable ? static_cast<std::size_t>(byte) : next++] = byte;
  }
  return symbols;
}

// The bytes a token spells; one with other characters in it is its own text.
std::string byte_level(const std::string& name) {
  static const std::array<int, 512> symbols = byte_symbols();
  std::string bytes;
  for (std::size_t i = 0; i < name.size(); ++i) {
    const auto lead = static_cast<unsigned char>(name[i]);
    std::size_t point = lead;
    if (lead >= 0x80) {
      if (lead >= 0xE0 || i + 1 >= name.size()) {
        return name;
      }
      point = (lead & 0x1FU) << 6 | (static_cast<unsigned char>(name[++i]) & 0x3FU);
    }
    if (point >= symbols.size() || symbols[point] < 0) {
      return name;
    }
    bytes.push_back(static_cast<char>(symbols[point]));
  }
  return bytes;
}

// The byte of a token such as <0x0A>; nothing for others.
std::optional<char> byte_of(const std::string& name) {
  if (name.size() != 6 || name.compare(0, 3, "<0x") != 0 || name[5] != '>') {
    return std::nullopt;
  }
  const std::string digits = name.substr(3, 2);
  if (digits.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) {
    return std::nullopt;
  }
  return static_cast<char>(std::strtol(digits.c_str(), nullptr, 16));
}

std::string with(std::string text, const std::string& old, const std::string& by) {
  for (std::size_t at = 0; (at = text.find(old, at)) != std::string::npos; at += by.size()) {
    text.replace(at, old.size(), by);
  }
  return text;
}

// The decoders that one applies in turn.
void flatten(const Json& decoder, std::vector<Json>& steps) {
  if (decoder.at("type").text() != "Sequence") {
    steps.push_back(decoder);
    return;
  }
  for (const Json& inner : decoder.at("decoders").items()) {
    flatten(inner, steps);
  }
}

}  // namespace

std::optional<Decoder> Decoder::read(const Json& decoder) {
  Decoder made;
  std::vector<Json> steps;
  flatten(decoder, steps);
  for (const Json& step : steps) {
    if (!made.add(step)) {
      return std::nullopt;
    }
  }
  // What a byte-level one has made is no place for others.
  const bool joins = !steps.empty() && (!made.byte_level_ || steps.size() == 1);
  return joins ? std::optional(made) : std::nullopt;
}

// Whether a step can be taken token by token, after those before it.
bool Decoder::add(const Json& step) {
  const std::string& type = step.at("type").text();
  const bool has_names = !byte_fallback_ && !fuses_;
  if (type == "ByteLevel") {
    byte_level_ = true;
  } else if (type == "ByteFallback") {
    byte_fallback_ = true;
    return !fuses_;
  } else if (type == "Fuse") {
    fuses_ = true;
  } else if (type == "Replace") {
    const Json* const old = step.at("pattern").find("String");
    const std::string by = step.at("content").text();
    if (old == nullptr || old->text().empty() || !has_names) {
      return false;
    }
    replacements_.push_back({old->text(), by, by});
  } else if (type == "Metaspace") {
    const Json* const scheme = step.find("prepend_scheme");  // older files have add_prefix_space
    const Json* const prefix = step.find("add_prefix_space");
    const bool prepends =
        scheme != nullptr ? scheme->text() != "never" : prefix == nullptr || prefix->boolean();
    const std::string& mark = step.at("replacement").text();
    if (mark.empty() || !has_names) {
      return false;
    }
    replacements_.push_back({mark, " ", prepends ? "" : " "});
  } else if (type == "Strip" && stripped_.empty()) {
    stripped_ = step.at("content").text();
    return fuses_ && step.at("start").integer() == 1 && step.at("stop").integer() == 0;
  } else {
    return false;
  }
  return true;
}

std::string Decoder::spelled(std::string name, std::string Replacement::* by) const {
  if (byte_level_) {
    return byte_level(name);
  }
  for (const Replacement& replacement : replacements_) {
    name = with(std::move(name), replacement.old, replacement.*by);
  }
  const std::optional<char> byte = byte_fallback_ ? byte_of(name) : std::nullopt;
  return byte ? std::string(1, *byte) : name;
}

std::string Decoder::bytes(const std::string& name) const {
  return spelled(name, &Replacement::by);
}

std::string Decoder::first_bytes(const std::string& name) const {
  return spelled(name, &Replacement::by_first);
}

bool Decoder::tells_first() const {
  return std::any_of(replacements_.begin(), replacements_.end(),
                     [](const Replacement& one) { return one.by != one.by_first; });
}

}  // namespace specrt::native
