// Two drafters in turn: the second is asked where the first has nothing to propose.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "native/draft.hpp"

namespace specrt::native {

// Asks one drafter, and another where the first proposes nothing.
//
// Meant for lookup before the draft model: a copy costs next to nothing and runs further, and where
// there is nothing to copy, or its policy chose a plain step or dropped the first token, the model
// drafts.
//
// While lookup drafts, the draft model's cache falls behind the committed tokens, and stays as it
// is. When its turn comes the model feeds all that it lacks in the one pass that drafts its first
// token (in chunks where that is wider than any pass it was built for), and drafts on from there
// one token at a time. Passes that nobody would have used are never run.
//
// Who was asked hears what came of it. To the first drafter a round that the second drafted was a
// plain step, of one token: its policy learns acceptance from tokens of its own only, and one that
// has given up still counts the rounds until it tries again, whoever drafts meanwhile. The times
// are those of the whole round. The second hears nothing of rounds that the first drafted.
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
