// The target's side of a round: score what was drafted, and decide how much of it is accepted.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "native/engine/protocol.hpp"
#include "native/sampling/distribution.hpp"
#include "native/sampling/noise.hpp"
#include "native/sampling/processors.hpp"
#include "native/speculation/kv_cache.hpp"
#include "native/speculation/round.hpp"
#include "params.hpp"

namespace specrt::native {

// Accept drafted tokens while they are what the target chooses; choose(i) is its choice after i of
// them. Greedy decoding chooses the likeliest.
Verdict match(const std::vector<Token>& drafted, const std::function<Token(std::size_t)>& choose);

// Accept the longest prefix that block verification allows, then draw from what is left; see
// specrt.speculation.target.
Verdict rejection(const Proposal& proposal, const std::function<Distribution(std::size_t)>& target,
                  const Noise& noise, std::size_t position);

// See specrt.speculation.target.EngineTarget. All that is given outlives it.
class Target {
 public:
  Target(KVCache& cache, const Params& params, const Noise& noise, LogitsProcessors* processors);

  // What the tokens of the prompt, all but the first, are worth to the target; read once, before
  // the first verification, where the request wants it.
  std::vector<Ranked> score_prompt(const std::vector<Token>& prompt);

  // Feed what the cache lacks plus the drafted tokens in one pass, and apply the rule. `logprobs`
  // are filled in for the accepted tokens and the next one, where the request wants them.
  Verdict verify(const std::vector<Token>& tokens, const Proposal& proposal,
                 std::vector<Ranked>& logprobs);

 private:
  Verdict verify_rows(const Proposal& proposal, const Output& output, std::size_t position);
  const float* row(const Output& output, const Proposal& proposal, std::size_t i);
  Distribution distribution(const Output& output, const Proposal& proposal, std::size_t i);

  KVCache& cache_;
  const Params& params_;
  const Noise& noise_;
  LogitsProcessors* processors_;
  std::vector<Token> fed_;
  std::size_t row_ = 0;  // the latest row that was looked at in a round
};

}  // namespace specrt::native
