// The target's side of a round: score what was drafted, and say what to keep.
#pragma once

#include <vector>

#include "native/engine.hpp"
#include "native/logprobs.hpp"
#include "native/noise.hpp"
#include "native/rules.hpp"
#include "native/verify.hpp"
#include "params.hpp"

namespace specrt::native {

// See specrt.target.EngineTarget. All that is given outlives it.
class Target {
 public:
  Target(CachedTokens& cache, const Params& params, const Noise& noise, Rules* rules);

  // What the tokens of the prompt, all but the first, are worth to the target; read once, before
  // the first verification, where it was asked for.
  std::vector<Ranked> score_prompt(const std::vector<Token>& prompt);

  // Feed what the cache lacks plus the drafted tokens in one pass, and apply the rule. `logprobs`
  // are filled in for the kept tokens and the next one, where asked for.
  Verdict verify(const std::vector<Token>& tokens, const Proposal& proposal,
                 std::vector<Ranked>& logprobs);

 private:
  Verdict judge(const Proposal& proposal, const Output& output, std::size_t position);
  const float* row(const Output& output, const Proposal& proposal, std::size_t i);
  Distribution distribution(const Output& output, const Proposal& proposal, std::size_t i);

  CachedTokens& cache_;
  const Params& params_;
  const Noise& noise_;
  Rules* rules_;
  std::vector<Token> fed_;
};

}  // namespace specrt::native
