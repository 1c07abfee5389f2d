// What a request says about the next token besides temperature: edits of a row of scores.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "params.hpp"

namespace specrt::native {

// The processors of one request in vLLM's order; see specrt.rules and specrt.processors. A row of a
// verify pass comes after tokens that are only drafted: its path, which is history for that row.
class Rules {
 public:
  virtual ~Rules() = default;
  // Take over what was committed since the last time; `tokens` is the whole text.
  virtual void learn(const std::vector<Token>& tokens) = 0;
  // A row with every edit made, in memory that the next call overwrites. The row may be shorter
  // than the vocabulary, of a draft that knows fewer tokens.
  virtual float* edit(const float* row, std::size_t size, const Token* path,
                      std::size_t path_size) = 0;
};

// Return the rules of a request, nullptr where it asks for none. `spell` encodes bad words without
// special tokens. Throws Failure(SPECRT_INVALID_ARGUMENT) for token ids that there are not, and
// Failure(SPECRT_UNSUPPORTED) for a structure (json_schema, regex, choice, grammar).
std::unique_ptr<Rules> rules_of(const Params& params,
                                const std::function<std::vector<Token>(const std::string&)>& spell,
                                const std::vector<Token>& ends, std::size_t vocabulary);

}  // namespace specrt::native
