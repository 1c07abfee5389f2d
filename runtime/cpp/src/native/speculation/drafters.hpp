// The drafters with a model: alone, and after a lookup.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "native/speculation/gamma.hpp"
#include "native/speculation/pool.hpp"

namespace specrt::native {

// Under `match` it draws with the noise the target will draw with, so that two similar
// distributions pick the same token (drafter-invariant speculative decoding, arXiv:2408.07978).
// Under `rejection` its draws must be independent of the target's, and of those of rounds before.
//
// `gamma` says how far to draft, token by token. A token's confidence is the
// largest probability of the draft's distribution: known before the token is drawn, so that leaving
// tokens out on its word is lossless under both verifiers.
//
// A head goes on from its own state while the target's features are not known. Its cache never
// counts a token that it drafted: what stood there is computed again once they are. So it lacks all
// tokens of the round before, and feeds them in one pass.
//
// A draft that knows ids which the target does not never proposes them; once one was committed that
// the draft does not know, it is silent.
class ModelDrafter : public Drafter {
 public:
  ModelDrafter(const Drafting& drafting, std::shared_ptr<GammaPolicy> gamma);

  Proposal propose(const std::vector<Token>& tokens, std::size_t room) override;
  void observe(const std::vector<Token>& tokens, const Round& round) override;

 private:
  struct Choice {
    Token token;
    double confidence;
  };

  Output feed(const std::vector<Token>& pending, std::size_t position, std::size_t drafted);
  void draft(std::vector<Token> pending, std::size_t position, std::size_t most,
             Proposal& proposal);
  std::optional<Choice> choose(const Output& output, std::size_t position, Proposal& proposal);
  Choice likeliest_of(const Output& output, const std::vector<Token>& path);
  Choice draw(const Output& output, std::size_t position, Proposal& proposal);
  const float* scores(const Output& output, const std::vector<Token>& path);

  KVCache& cache_;
  const Params& params_;
  const Noise& noise_;
  LogitsProcessors* processors_;
  std::size_t vocabulary_;
  std::shared_ptr<GammaPolicy> gamma_;
  bool keeps_;  // whether the rule asks what tokens were drawn from
  bool is_head_;
  std::size_t usual_;  // most tokens that the cache lacks after a round of its own
};

// Asks one drafter, and another where the first proposes nothing.
//
// Meant for lookup before the draft model: a copy costs next to nothing and runs further, and where
// there is nothing to copy, or its policy chose a plain step or dropped the first token, the model
// drafts.
//
// While lookup drafts, the draft model's cache falls behind the committed tokens, and stays as it
// is. When its turn comes the model feeds all that it lacks in the one pass that drafts its first
// token (in chunks where that is wider than any pass it was built for), and drafts on from there
// one token at a time. No pass is run whose result is unused.
//
// A drafter observes the rounds it was asked in. To the first drafter a round that the second
// drafted was a plain step, of one token: its policy learns acceptance from tokens of its own only,
// and one that has given up still counts the rounds until it tries again. The times are those of
// the whole round. The second hears nothing of rounds that the first drafted.
class CascadeDrafter : public Drafter {
 public:
  CascadeDrafter(std::unique_ptr<Drafter> first, std::unique_ptr<Drafter> second);

  Proposal propose(const std::vector<Token>& tokens, std::size_t room) override;
  void observe(const std::vector<Token>& tokens, const Round& round) override;

 private:
  std::unique_ptr<Drafter> first_;
  std::unique_ptr<Drafter> second_;
  bool both_ = false;  // whether the second drafter was asked in this round
};

}  // namespace specrt::native
