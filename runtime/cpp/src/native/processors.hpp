// Edits of a row of scores, as requests ask for them; those of specrt.processors.
//
// Each keeps what it must know of the text so far, and takes drafted tokens before a row as history
// of that row alone: a score comes out the same, to the bit, whether a token before it is committed
// yet or not. Scores are edited in f32, as they are in Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "native/seen.hpp"
#include "params.hpp"

namespace specrt::native {

struct Row {
  float* scores;
  std::size_t size;

  bool has(Token token) const {
    return token >= 0 && static_cast<std::uint64_t>(token) < static_cast<std::uint64_t>(size);
  }
  void rule_out(Token token);
};

class Processor {
 public:
  virtual ~Processor() = default;
  // Learn of tokens that are now part of the text, in order; the first time, of the prompt.
  virtual void commit(Span tokens) = 0;
  // Change scores in place; `path` comes between the text and the row.
  virtual void edit(Row row, Span path) = 0;
};

// Lets only some tokens be. It edits while it copies, which is why it is no Processor.
class AllowedTokens {
 public:
  AllowedTokens(const std::vector<Token>& ids, std::size_t vocabulary);
  void copy(const float* row, std::size_t size, float* into) const;

 private:
  std::vector<float> most_;
};

// Keeps sequences of tokens, none of them empty, from being completed.
class BadWords : public Processor {
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
class MinTokens : public Processor {
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
class LogitBias : public Processor {
 public:
  explicit LogitBias(const std::vector<std::pair<Token, double>>& bias);
  void commit(Span) override {}
  void edit(Row row, Span path) override;

 private:
  std::vector<std::pair<Token, float>> bias_;
};

// A function of the caller's.
class Custom : public Processor {
 public:
  explicit Custom(specrt::Processor called) : called_(called) {}
  void commit(Span tokens) override;
  // Throws Failure(SPECRT_CALLBACK) where the function fails, Failure(SPECRT_INVALID_ARGUMENT) for
  // what it leaves that is no score.
  void edit(Row row, Span path) override;

 private:
  void call(Row row);

  specrt::Processor called_;
  std::vector<Token> text_;
};

// Divides scores above 0 of tokens in prompt or output, and multiplies those below.
//
// Source: Keskar et al. 2019, arXiv:1909.05858.
class RepetitionPenalty : public Processor {
 public:
  explicit RepetitionPenalty(double penalty);
  void commit(Span tokens) override { seen_.add(tokens); }
  void edit(Row row, Span path) override;

 private:
  void punish(Row row, Token token) const;

  float penalty_;
  bool lowers_;
  Seen seen_;
};

// Takes from the scores of tokens of the output: once each, and once each time. As vLLM and OpenAI
// define presence and frequency penalties; the prompt does not count.
class OutputPenalties : public Processor {
 public:
  OutputPenalties(double presence, double frequency);
  void commit(Span tokens) override;
  void edit(Row row, Span path) override;

 private:
  float taken(std::uint32_t times) const;

  float presence_;
  float frequency_;
  Seen seen_;
  std::vector<float> drafted_;
  bool begun_ = false;
};

// Keeps any n tokens in a row from coming twice.
//
// Source: Paulus et al. 2017, arXiv:1705.04304.
class NoRepeatNgram : public Processor {
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

}  // namespace specrt::native
