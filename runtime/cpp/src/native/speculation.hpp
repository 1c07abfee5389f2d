// The round: draft, verify, accept, commit.
#pragma once

#include <vector>

#include "native/draft.hpp"
#include "native/round.hpp"
#include "native/target.hpp"

namespace specrt::native {

// Extends `tokens` round by round to at most `limit`. They hold the prompt and are the only truth:
// each model's cache is a prefix of them that never includes the last one. The first round is the
// prefill's token: nothing is drafted for it, and no drafter learns from it.
// Source: Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318.
class Speculation {
 public:
  Speculation(Target& target, Drafter& drafter, std::vector<Token>& tokens, std::size_t limit,
              bool scores_prompt)
      : target_(target),
        drafter_(drafter),
        tokens_(tokens),
        limit_(limit),
        scores_prompt_(scores_prompt) {}

  // Run a round. There must be fewer tokens than the limit.
  Round next();

 private:
  Target& target_;
  Drafter& drafter_;
  std::vector<Token>& tokens_;
  std::size_t limit_;
  bool scores_prompt_;
  bool prefilled_ = false;
};

}  // namespace specrt::native
