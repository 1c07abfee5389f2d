// From tokens to text as they come: UTF-8 in pieces, tokenizers without bytes, stop strings.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "params.hpp"

namespace specrt::native {

// Joins bytes and gives out whole characters. What is not UTF-8 becomes U+FFFD, one for each
// maximal part that could have begun a character. What comes when is as in Python's incremental
// decoder.
class Utf8Decoder {
 public:
  // Add bytes; return the text that became certain.
  std::string push(std::string_view bytes);
  // Return what was held back: half a character becomes U+FFFD.
  std::string finish();

 private:
  void take(unsigned char byte, std::string& text);
  void settle(std::string& text);

  std::string held_;          // of a character that is not whole yet
  int missing_ = 0;           // bytes that it lacks
  int late_ = -1;             // a byte that ended a piece, and is not looked at yet
  unsigned char low_ = 0x80;  // what its next byte may be
  unsigned char high_ = 0xBF;
};

// Whether a text is UTF-8 from end to end.
bool is_utf8(std::string_view text);

class Detokenizer {
 public:
  virtual ~Detokenizer() = default;
  // Add tokens and return the text that became certain.
  virtual std::string push(const Token* ids, std::size_t count) = 0;
  // Return what was held back; half a character becomes U+FFFD.
  virtual std::string finish() = 0;
};

// What the tokens of a vocabulary spell, whatever stands next to them.
struct Spelling {
  std::vector<std::string> bytes;  // of each token; one that it lacks, and a special one, has none
  std::vector<std::string> first;  // of the first one with bytes; empty where those are no others
  std::string stripped;            // what that one loses, where it begins with it
};

// Joins the bytes of tokens, after those of the tokens `before`. Half a character at the end of
// those is given out once it is completed, and never as U+FFFD.
class ByteDetokenizer : public Detokenizer {
 public:
  explicit ByteDetokenizer(const Spelling& spelling, const std::vector<Token>& before = {});
  std::string push(const Token* ids, std::size_t count) override;
  std::string finish() override { return fresh(decoder_.finish()); }

 private:
  std::string joined(const Token* ids, std::size_t count);
  std::string fresh(std::string text);

  const Spelling& spelling_;
  bool begun_ = false;  // whether there was a token with bytes
  Utf8Decoder decoder_;
  std::string lost_;  // what half a character of `before` is where nothing completes it
};

// Decodes new tokens with the last few in view, for decoders that look at their neighbours. None of
// the tokens `before` is a special one.
class WindowDetokenizer : public Detokenizer {
 public:
  using Decode = std::function<std::string(const std::vector<Token>&)>;
  static constexpr std::size_t kContext = 4;
  // Tokens that are not text, as special ones, have no place in the window.
  WindowDetokenizer(Decode decode, const std::vector<Token>& before,
                    std::function<bool(Token)> is_text);
  std::string push(const Token* ids, std::size_t count) override;
  std::string finish() override;

 private:
  void shorten();
  std::string give(const std::string& text);
  std::string seen(const std::string& text) const;

  Decode decode_;
  std::function<bool(Token)> is_text_;
  std::vector<Token> ids_;
  std::string given_;     // the text of those but the last `held_`
  std::size_t held_ = 0;  // tokens whose text was not given out
};

// Where no text can be made of tokens.
class NoDetokenizer : public Detokenizer {
 public:
  std::string push(const Token*, std::size_t) override { return ""; }
  std::string finish() override { return ""; }
};

// Finds where a text must end, holding back what may be the beginning of a stop string. What a byte
// costs grows with the places where one may have begun, and hardly with the number of stop strings.
class StopStrings {
 public:
  explicit StopStrings(std::vector<std::string> stops);
  StopStrings(const StopStrings&) = delete;
  StopStrings& operator=(const StopStrings&) = delete;

  struct Shown {
    std::string text;                // what may be shown
    std::optional<std::string> met;  // the stop string that ended it
  };

  Shown push(const std::string& text);
  // Return what was held back, when no stop string came.
  std::string finish();

 private:
  using Stop = std::vector<std::string>::const_iterator;
  // Stop strings that go on as the text does from a place.
  struct Begun {
    std::size_t place;
    Stop first, last;
  };

  const std::string* meet(char byte, std::size_t at);

  std::vector<std::string> stops_;  // sorted
  std::vector<Begun> begun_;        // by place
  std::string held_;                // from the first of these places
};

}  // namespace specrt::native
