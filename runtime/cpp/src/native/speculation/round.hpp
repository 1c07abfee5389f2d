// The round: draft, verify, accept, commit; and what its two sides hand each other.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "native/sampling/distribution.hpp"
#include "params.hpp"

namespace specrt::native {

// The time of a clock that never goes back.
inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// What a drafter proposes. `distributions` are those the tokens were drawn from; empty where every
// token was certain, or where the rule does not ask.
struct Proposal {
  std::vector<Token> tokens;
  std::vector<Distribution> distributions;
  std::string source;               // "model", "ngram"; empty where nothing was proposed
  std::vector<double> confidences;  // one for each token
  bool caught_up = false;           // it first fed tokens of rounds that it had no part in
};

// How many drafted tokens were accepted, and the target's own token after them.
struct Verdict {
  std::size_t accepted;
  Token next;
};

// The record of one round, which drafters learn from and statistics count.
struct Round {
  std::vector<Token> tokens;  // committed: the accepted ones and the target's own
  std::size_t drafted = 0;
  std::size_t accepted = 0;
  std::int64_t draft_ns = 0;
  std::int64_t verify_ns = 0;
  std::string source;
  std::vector<double> confidences;
  bool caught_up = false;
  std::vector<Ranked> logprobs;         // one for each token, where the request wants them
  std::vector<Ranked> prompt_logprobs;  // of the first round only

  std::size_t evaluated() const { return accepted + (accepted < drafted ? 1 : 0); }
};

// A source of proposals. It may be wrong; it may not be slow.
class Drafter {
 public:
  virtual ~Drafter() = default;
  // Propose at most `room` tokens to follow the committed ones.
  virtual Proposal propose(const std::vector<Token>& tokens, std::size_t room) = 0;
  // Learn what was committed, all of it, after a round, and what the round came to.
  virtual void observe(const std::vector<Token>& tokens, const Round& round) = 0;
};

class Target;

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
