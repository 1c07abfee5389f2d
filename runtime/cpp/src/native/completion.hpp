// Everything known about one completion: its text, counts, times, and why it ended.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "implementation.hpp"
#include "native/sampling/distribution.hpp"
#include "native/speculation/round.hpp"

namespace specrt::native {

class Tokenizer;

struct Completion {
  std::size_t prompt_tokens = 0;
  std::size_t cached_tokens = 0;
  std::int64_t seed = 0;
  int gamma = kAuto;
  std::string drafter;
  std::string fallback;

  std::string text;
  std::vector<Token> ids;
  std::string finish_reason;  // "stop", "length"; empty while unfinished
  std::optional<Token> stop_token;
  std::optional<std::string> stop_string;
  bool wants_logprobs = false;
  std::vector<Ranked> logprobs;
  std::optional<std::vector<Ranked>> prompt_logprobs;  // from the second token of the prompt on

  // Counts of the rounds; the prefill is not one.
  std::uint64_t rounds = 0;
  std::uint64_t drafted = 0;
  std::uint64_t evaluated = 0;
  std::uint64_t accepted = 0;
  std::uint64_t emitted = 0;
  std::map<std::string, std::pair<std::uint64_t, std::uint64_t>> sources;  // drafted, accepted

  std::int64_t began_ns = 0;
  std::vector<std::pair<std::int64_t, std::size_t>> arrivals;  // time, tokens; the prefill first

  // Count a round, of whose tokens `kept` were delivered.
  void count(const Round& round, std::size_t delivered, std::int64_t time_ns);
  Stats stats() const;
  // The object that `specrt generate --json` prints.
  std::string json(const Tokenizer& tokenizer) const;
};

// What is told of each position.
std::vector<Logprobs> told(const std::vector<Ranked>& positions);

}  // namespace specrt::native
