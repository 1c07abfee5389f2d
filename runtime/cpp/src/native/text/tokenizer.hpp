// The tokenizer of a bundle: text of tokens, and tokens of text where a library can be had.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "native/text/decoder.hpp"
#include "native/text/detokenizer.hpp"
#include "native/text/genai.hpp"
#include "native/text/json.hpp"
#include "params.hpp"

namespace specrt::native {

// Text is encoded by the tokenizer library. Tokens of byte-level and SentencePiece vocabularies are
// decoded here, from tokenizer.json, others by the library. Any thread.
class Tokenizer {
 public:
  // `library` may be empty: then there is no `encode`. The model scores ids below `scored`; there
  // is not text of others. Throws Failure(SPECRT_BUNDLE) for what is not a tokenizer. What keeps
  // the library from being used is in `notice`.
  Tokenizer(const std::string& bundle, const std::string& library, std::optional<Token> bos,
            std::size_t scored);

  bool encodes() const { return library_ != nullptr; }
  bool decodes() const { return decoder_ || encodes(); }
  // The largest id the tokenizer knows, plus one.
  std::size_t size() const { return size_; }
  const std::string& notice() const { return notice_; }

  // The ids of a text; `special` adds what the tokenizer adds by itself. An empty text is the BOS
  // token alone. Throws Failure(SPECRT_INVALID_ARGUMENT), and SPECRT_UNSUPPORTED without a library.
  // Without `parse_special` the texts of control tokens are text like any other; SPECRT_UNSUPPORTED
  // where the library cannot spell one so.
  std::vector<Token> encode(const std::string& text, bool special = true,
                            bool parse_special = true) const;
  // The ids of a text as the middle of another, without special tokens and without the space that a
  // tokenizer begins a text with: what it adds to the end of a line.
  std::vector<Token> encode_middle(const std::string& text) const;
  // The text of some ids, special tokens left out.
  std::string decode(const std::vector<Token>& ids) const;
  // The text of a token after others; parts of characters are U+FFFD.
  std::string piece(Token token) const;
  // The bytes of a token after others; those of its text where the library decodes.
  std::string bytes_of(Token token) const;
  // Makes text of the tokens after others: with those, less the text of those alone.
  std::unique_ptr<Detokenizer> detokenizer(const std::vector<Token>& before) const;

 private:
  bool is_text(Token token) const;
  void read(const Json& file);
  void add(Token token, const std::string& name, bool special);
  void read_template(const Json& processor);
  std::vector<Token> ids_of(const std::string& text) const;
  std::vector<Token> plain_ids_of(const std::string& text) const;

  std::optional<Token> bos_;
  std::size_t scored_;
  std::optional<Decoder> decoder_;
  bool parts_digits_ = false;
  std::size_t size_ = 0;
  std::unordered_set<Token> special_;
  std::vector<std::string> controls_;  // their texts
  Spelling spelling_;                  // with a decoder that joins
  std::unique_ptr<GenaiTokenizer> library_;
  std::size_t library_adds_ = 0;  // tokens that the library puts before a text by itself
  std::vector<Token> before_;     // what the tokenizer's template puts before a text, and behind
  std::vector<Token> behind_;
  std::string notice_;
};

// Part a text before every number that follows white space. The tokenizer library looks across such
// a place, where tokenizers that part digits from the rest do not: the last of several spaces would
// go with the number.
std::vector<std::string> before_digits(const std::string& text);

}  // namespace specrt::native
