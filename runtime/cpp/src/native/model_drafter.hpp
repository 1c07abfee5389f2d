// A draft model with a cache of its own.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "native/draft.hpp"
#include "native/gamma.hpp"

namespace specrt::native {

// Under `match` it draws with the noise the target will draw with, so that two similar
// distributions pick the same token (drafter-invariant speculative decoding, arXiv:2408.07978).
// Under `rejection` its draws must be independent of the target's, and of those of rounds before.
//
// `gamma` says how far to draft, token by token. What it is told of a token, its confidence, is the
// largest probability of the draft's distribution: known before the token is drawn, so that leaving
// tokens out on its word is lossless under both rules.
//
// A draft that knows ids which the target does not never proposes them; once one was committed that
// the draft does not know, it is silent.
class ModelDrafter : public Drafter {
 public:
  ModelDrafter(const Drafting& drafting, std::shared_ptr<GammaPolicy> gamma);

  Proposal propose(const std::vector<Token>& tokens, std::size_t room) override;
  void observe(const std::vector<Token>& tokens, const Round& round) override;

 private:
  struct Chosen {
    Token token;
    double confidence;
  };

  void draft(std::vector<Token> pending, std::size_t position, std::size_t most,
             Proposal& proposal);
  std::optional<Chosen> choose(const Output& output, std::size_t position, Proposal& proposal);
  Chosen likeliest_of(const Output& output, const std::vector<Token>& path);
  Chosen draw(const Output& output, std::size_t position, Proposal& proposal);
  const float* scores(const Output& output, const std::vector<Token>& path);

  CachedTokens& cache_;
  const Params& params_;
  const Noise& noise_;
  Rules* rules_;
  std::size_t vocabulary_;
  std::shared_ptr<GammaPolicy> gamma_;
  bool keeps_;  // whether the rule asks what tokens were drawn from
};

}  // namespace specrt::native
