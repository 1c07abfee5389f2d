// Edits of a row of scores, as requests ask for them; those of specrt.sampling.processors.
//
// Each keeps what it must know of the text so far, and takes drafted tokens before a row as history
// of that row alone: a score comes out the same, to the bit, whether a token before it is committed
// yet or not. Scores are edited in f32, as they are in Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "params.hpp"

namespace specrt::native {

// A view of consecutive tokens.
struct Span {
  const Token* first;
  std::size_t size;

  const Token* begin() const { return first; }
  const Token* end() const { return first + size; }
  Token operator[](std::size_t i) const { return first[i]; }
};

class TokenCounts {
 public:
  struct Entry {
    Token token;
    std::uint32_t times;
  };

  void add(Span tokens);
  // The different tokens, in the order they came.
  const std::vector<Entry>& entries() const { return entries_; }
  std::uint32_t times(Token token) const;

 private:
  std::vector<Entry> entries_;
  std::unordered_map<Token, std::size_t> places_;
};

struct Row {
  float* scores;
  std::size_t size;

  bool has(Token token) const {
    return token >= 0 && static_cast<std::uint64_t>(token) < static_cast<std::uint64_t>(size);
  }
  void rule_out(Token token);
};

class LogitsProcessor {
 public:
  virtual ~LogitsProcessor() = default;
  // Learn of tokens that are now part of the text, in order; the first time, of the prompt.
  virtual void commit(Span tokens) = 0;
  // Change scores in place; `path` comes between the text and the row.
  virtual void edit(Row row, Span path) = 0;
};

// Lets only some tokens be. It edits while it copies, which is why it is not a LogitsProcessor.
class AllowedTokens {
 public:
  AllowedTokens(const std::vector<Token>& ids, std::size_t vocabulary);
  void copy(const float* row, std::size_t size, float* into) const;

 private:
  std::vector<float> most_;
};

// Keeps sequences of tokens, none of them empty, from being completed.
class BadWords : public LogitsProcessor {
 public:
  explicit BadWords(std::vector<std::vector<Token>> words);
  void commit(Span tokens) override;
  void edit(Row row, Span path) override;

 private:
  bool ends_like(const std::vector<Token>& word, Span path) const;

  std::vector<std::vector<Token>> words_;
  std::size_t reach_;
  std::vector<Token> last_;
};

// Keeps the text from ending before it has so many tokens.
class MinTokens : public LogitsProcessor {
 public:
  MinTokens(std::int64_t least, std::vector<Token> ends) : left_(least), ends_(std::move(ends)) {}
  void commit(Span tokens) override;
  void edit(Row row, Span path) override;

 private:
  std::int64_t left_;
  std::vector<Token> ends_;
  bool begun_ = false;
};

// Adds to the scores of some tokens. Of a token that is there twice the last one holds.
class LogitBias : public LogitsProcessor {
 public:
  explicit LogitBias(const std::vector<std::pair<Token, double>>& bias);
  void commit(Span) override {}
  void edit(Row row, Span path) override;

 private:
  std::vector<std::pair<Token, float>> bias_;
};

// A function of the caller's.
class CallbackProcessor : public LogitsProcessor {
 public:
  explicit CallbackProcessor(specrt::Processor called) : called_(called) {}
  void commit(Span tokens) override;
  // Throws Failure(SPECRT_CALLBACK) where the function ends the generation. What it leaves are
  // scores: abi/processor_guard.hpp sees to that.
  void edit(Row row, Span path) override;

 private:
  specrt::Processor called_;
  std::vector<Token> text_;
};

// Divides scores above 0 of tokens in prompt or output, and multiplies those below.
//
// Source: Keskar et al. 2019, arXiv:1909.05858.
class RepetitionPenalty : public LogitsProcessor {
 public:
  explicit RepetitionPenalty(double penalty);
  void commit(Span tokens) override { counts_.add(tokens); }
  void edit(Row row, Span path) override;

 private:
  void punish(Row row, Token token) const;

  float penalty_;
  bool lowers_;
  TokenCounts counts_;
};

// Takes from the scores of tokens of the output: once each, and once each time. As vLLM and OpenAI
// define presence and frequency penalties; the prompt does not count.
class OutputPenalties : public LogitsProcessor {
 public:
  OutputPenalties(double presence, double frequency);
  void commit(Span tokens) override;
  void edit(Row row, Span path) override;

 private:
  float taken(std::uint32_t times) const;

  float presence_;
  float frequency_;
  TokenCounts counts_;
  std::vector<float> drafted_;
  bool begun_ = false;
};

// Keeps any n tokens in a row from coming twice.
//
// Source: Paulus et al. 2017, arXiv:1705.04304.
class NoRepeatNgram : public LogitsProcessor {
 public:
  explicit NoRepeatNgram(std::int64_t size) : before_(static_cast<std::size_t>(size) - 1) {}
  void commit(Span tokens) override;
  void edit(Row row, Span path) override;

 private:
  std::uint64_t key(std::size_t end) const;
  bool same(std::size_t end, std::size_t other) const;

  std::size_t before_;  // tokens of a run before its last one
  std::vector<Token> text_;
  // Where tokens stand in the text, by a hash of those before them.
  std::unordered_map<std::uint64_t, std::vector<std::size_t>> after_;
};

// The processors of one request in vLLM's order; see specrt.sampling.processors. A row
// of a verify pass comes after tokens that are only drafted: its path, which is history for that
// row.
class LogitsProcessors {
 public:
  virtual ~LogitsProcessors() = default;
  // Take over what was committed since the last time; `tokens` is the whole text.
  virtual void learn(const std::vector<Token>& tokens) = 0;
  // A row with every edit made, in memory that the next call overwrites. The row may be shorter
  // than the vocabulary, of a draft that knows fewer tokens.
  virtual float* edit(const float* row, std::size_t size, const Token* path,
                      std::size_t path_size) = 0;
};

// Encodes a word without special tokens, as a text of its own or as the middle of another.
using Spell = std::function<std::vector<Token>(const std::string& word, bool middle)>;

// Return the rules of a request, nullptr where it asks for none. `spell` is for bad words. Throws
// Failure(SPECRT_INVALID_ARGUMENT) for token ids that there are not, and
// Failure(SPECRT_UNSUPPORTED) for a structure (json_schema, regex, choice, grammar).
std::unique_ptr<LogitsProcessors> build_processors(const Params& params, const Spell& spell,
                                                   const std::vector<Token>& ends,
                                                   std::size_t vocabulary);

}  // namespace specrt::native
