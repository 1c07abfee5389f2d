#include "native/cascade.hpp"

#include <utility>

namespace specrt::native {

CascadeDrafter::CascadeDrafter(std::unique_ptr<Drafter> first, std::unique_ptr<Drafter> second)
    : first_(std::move(first)), second_(std::move(second)) {}

Proposal CascadeDrafter::propose(const std::vector<Token>& tokens, std::size_t room) {
  Proposal proposal = first_->propose(tokens, room);
  both_ = proposal.tokens.empty();
  return both_ ? second_->propose(tokens, room) : proposal;
}

void CascadeDrafter::observe(const std::vector<Token>& tokens, const Round& round) {
  if (!both_) {
    first_->observe(tokens, round);
    return;
  }
  Round plain;
  if (!round.tokens.empty()) plain.tokens = {round.tokens.front()};
  plain.draft_ns = round.draft_ns;
  plain.verify_ns = round.verify_ns;
  first_->observe(tokens, plain);
  second_->observe(tokens, round);
}

}  // namespace specrt::native
