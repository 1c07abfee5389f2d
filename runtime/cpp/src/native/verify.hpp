// How much of a draft the target keeps: two lossless rules, as pure functions.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "native/noise.hpp"
#include "native/sampling.hpp"
#include "params.hpp"

namespace specrt::native {

// What a drafter proposes. `distributions` are those the tokens were drawn from; empty where every
// token was certain, or where the rule does not ask.
struct Proposal {
  std::vector<Token> tokens;
  std::vector<Distribution> distributions;
  std::string source;               // "model", "ngram"; empty where nothing was proposed
  std::vector<double> confidences;  // one for each token, where the drafter was asked
  bool caught_up = false;           // it first fed tokens of rounds that it had no part in
};

// How many drafted tokens were kept, and the target's own token after them.
struct Verdict {
  std::size_t accepted;
  Token next;
};

// Accept drafted tokens while they are what the target chooses; choose(i) is its choice after i of
// them. Greedy decoding chooses the likeliest.
Verdict match(const std::vector<Token>& drafted, const std::function<Token(std::size_t)>& choose);

// Accept x with probability min(1, p(x)/q(x)), else draw from norm(max(0, p - q)).
Verdict rejection(const Proposal& proposal, const std::function<Distribution(std::size_t)>& target,
                  const Noise& noise, std::size_t position);

}  // namespace specrt::native
