// The decoder of a tokenizer.json, where the text of tokens is what each of them spells, in a row.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "native/text/json.hpp"

namespace specrt::native {

// Byte-level decoders, and those of SentencePiece vocabularies: a mark for the space, and bytes as
// tokens `<0x00>` to `<0xFF>`. See specrt.text.detokenizer.Spelling.
class Decoder {
 public:
  // Nothing for a decoder that looks at its neighbours. Throws std::runtime_error for what is no
  // decoder.
  static std::optional<Decoder> read(const Json& decoder);

  // The bytes that a token of a name spells, and those of a text's first token, before `stripped`.
  std::string bytes(const std::string& name) const;
  std::string first_bytes(const std::string& name) const;
  // Whether those differ.
  bool tells_first() const;
  // What the first token of a text loses, where it begins with it.
  const std::string& stripped() const { return stripped_; }

 private:
  struct Replacement {
    std::string old;
    std::string by;
    std::string by_first;  // in the first token of a text
  };

  bool add(const Json& step);
  std::string spelled(std::string name, std::string Replacement::* by) const;

  bool byte_level_ = false;
  bool byte_fallback_ = false;
  bool fuses_ = false;
  std::vector<Replacement> replacements_;
  std::string stripped_;
};

}  // namespace specrt::native
