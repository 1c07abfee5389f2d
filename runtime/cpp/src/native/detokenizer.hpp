// Tokens into text as they come.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "native/utf8.hpp"
#include "params.hpp"

namespace specrt::native {

class Detokenizer {
 public:
  virtual ~Detokenizer() = default;
  // Add tokens and return the text that became certain.
  virtual std::string push(const Token* ids, std::size_t count) = 0;
  // Return what was held back; half a character becomes U+FFFD.
  virtual std::string finish() = 0;
};

// Joins the bytes of byte-level tokens: a token is its bytes, whatever stands beside it.
class ByteDetokenizer : public Detokenizer {
 public:
  // `bytes` holds those of each token; one that it lacks, and a special one, has none.
  explicit ByteDetokenizer(const std::vector<std::string>& bytes) : bytes_(bytes) {}
  std::string push(const Token* ids, std::size_t count) override;
  std::string finish() override { return decoder_.finish(); }

 private:
  const std::vector<std::string>& bytes_;
  Utf8Decoder decoder_;
};

// Asks a tokenizer for the text of the last tokens; see specrt.text.Detokenizer.
class AskingDetokenizer : public Detokenizer {
 public:
  using Decode = std::function<std::string(const std::vector<Token>&)>;
  explicit AskingDetokenizer(Decode decode) : decode_(std::move(decode)) {}
  std::string push(const Token* ids, std::size_t count) override;
  std::string finish() override;

 private:
  std::string give(const std::string& text);

  Decode decode_;
  std::vector<Token> ids_;
  std::size_t given_ = 0;
  std::string given_text_;
};

// Where no text can be made of tokens.
class NoDetokenizer : public Detokenizer {
 public:
  std::string push(const Token*, std::size_t) override { return ""; }
  std::string finish() override { return ""; }
};

}  // namespace specrt::native
