// Log-probabilities of tokens, from the target's own scores before anything edits them.
#pragma once

#include <cstddef>
#include <vector>

#include "params.hpp"

namespace specrt::native {

struct Ranked {
  Token token;                   // the one that came
  double logprob;                // -inf where its score is
  std::size_t rank;              // 1 for the likeliest; of equal scores the lower id comes first
  std::vector<Token> ids;        // the k likeliest, falling
  std::vector<double> logprobs;  // of these
};

// What a row says of the token that came after it, and of the k likeliest; see specrt.logprobs.
Ranked ranked(const float* logits, std::size_t vocabulary, Token token, std::size_t k);

}  // namespace specrt::native
