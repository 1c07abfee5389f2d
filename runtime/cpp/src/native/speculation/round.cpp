#include "native/speculation/round.hpp"

#include "native/speculation/target.hpp"

namespace specrt::native {

Round Speculation::next() {
  const std::int64_t began = now_ns();
  Round round;
  if (scores_prompt_) {
    round.prompt_logprobs = target_.score_prompt(tokens_);
    scores_prompt_ = false;
  }
  // Near the limit there is less room, so that no committed token is thrown away.
  const std::size_t room = limit_ - tokens_.size() - 1;
  Proposal proposal = prefilled_ ? drafter_.propose(tokens_, room) : Proposal();
  const std::int64_t drafted = now_ns();
  const Verdict verdict = target_.verify(tokens_, proposal, round.logprobs);
  round.verify_ns = now_ns() - drafted;
  round.draft_ns = drafted - began;
  round.drafted = proposal.tokens.size();
  round.accepted = verdict.accepted;
  round.tokens.assign(proposal.tokens.begin(),
                      proposal.tokens.begin() + static_cast<std::ptrdiff_t>(verdict.accepted));
  round.tokens.push_back(verdict.next);
  round.source = std::move(proposal.source);
  round.confidences = std::move(proposal.confidences);
  round.caught_up = proposal.caught_up;
  tokens_.insert(tokens_.end(), round.tokens.begin(), round.tokens.end());
  if (prefilled_) {
    drafter_.observe(tokens_, round);
  }
  prefilled_ = true;
  return round;
}

}  // namespace specrt::native
