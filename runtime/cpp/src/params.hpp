// What a caller may ask of one generation; the names and ranges are those of specrt.SamplingParams.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "specrt/specrt.h"

namespace specrt {

using Token = std::int64_t;

constexpr int kAuto = -1;  // gamma chosen round by round

struct Processor {
  specrt_processor function;
  void* user;
  // Counts the owners of `user`, which may outlive the generation. NULL where there is none.
  void (*hold)(void* user, std::int32_t by) = nullptr;
};

struct Params {
  std::int64_t max_tokens = 128;
  double temperature = 0.0;
  std::int64_t top_k = 0;
  double top_p = 1.0;
  double min_p = 0.0;
  double typical_p = 1.0;
  std::optional<double> repetition_penalty;  // without one, the bundle's, or 1
  double presence_penalty = 0.0;
  double frequency_penalty = 0.0;
  std::optional<std::int64_t> no_repeat_ngram_size;  // without one, the bundle's, or 0
  std::vector<std::pair<Token, double>> logit_bias;
  std::vector<std::string> bad_words;
  std::optional<std::vector<Token>> allowed_token_ids;
  std::optional<std::int64_t> min_tokens;  // without one, the bundle's, or 0
  std::vector<Processor> processors;
  std::optional<std::string> json_schema;
  std::optional<std::string> regex;
  std::vector<std::string> choice;
  std::optional<std::string> grammar;
  std::optional<std::int64_t> logprobs;
  std::optional<std::int64_t> prompt_logprobs;
  std::optional<std::int64_t> seed;
  std::vector<std::string> stop;
  std::vector<Token> stop_token_ids;
  bool ignore_eos = false;
  bool parse_special = true;  // control tokens in a prompt that is text
  std::string verifier = "match";
  std::optional<int> gamma;  // kAuto or a number; without one, the bundle's
  std::string drafter;       // empty: the bundle's

  bool greedy() const { return temperature == 0.0; }
};

// Set one option. Throws Failure(SPECRT_INVALID_ARGUMENT) for a name there is not, with the nearest
// one, for an option of another kind, and for a value out of range, with the range.
void set_integer(Params& params, const std::string& name, std::int64_t value);
void set_number(Params& params, const std::string& name, double value);
void set_text(Params& params, const std::string& name, std::string value);
void add_text(Params& params, const std::string& name, std::string value);
void add_tokens(Params& params, const std::string& name, const Token* ids, std::size_t count);
void add_bias(Params& params, Token token, double bias);
// Make an option what it is where it was not set.
void clear(Params& params, const std::string& name);

// Refuse what does not go together: min_tokens above max_tokens, two structures, and so on.
void check(const Params& params);

}  // namespace specrt
