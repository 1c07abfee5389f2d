// Lookup: what followed the text's last tokens when they were there before.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "native/draft.hpp"
#include "native/gamma.hpp"
#include "native/suffixes.hpp"

namespace specrt::native {

// Copies from the prompt and from the output so far, without any model.
//
// It finds the longest suffix of the text that was there before, takes its most recent occurrence,
// and drafts the tokens that followed. Where they run up to the end of the text it goes on with the
// tokens it has just drafted, so that a text of any period continues. Where nothing matches it
// proposes nothing, and the round is a plain step.
//
// The confidence that `gamma` is told is n / (n + 2) for a token that follows n tokens of
// agreement: the match, and the tokens drafted before it, which count only once they are kept. It
// is known without drawing anything, so leaving tokens out on its word is lossless under both
// rules. A drafted token is certain: there is no distribution.
//
// The text is read as it grows, each token once. A drafter is made for one generation; given a text
// that does not continue the one before it starts anew. It looks only at how long the text is and
// at the last token read, because a wrong guess costs a rejected draft and nothing else.
// Source: prompt lookup, Saxena 2023; the copies that overlap themselves, Ziv and Lempel 1977.
class NgramDrafter : public Drafter {
 public:
  explicit NgramDrafter(std::shared_ptr<GammaPolicy> gamma);

  Proposal propose(const std::vector<Token>& tokens, std::size_t room) override;
  void observe(const std::vector<Token>& tokens, const Round& round) override;

 private:
  void read(const std::vector<Token>& tokens);
  Proposal copy(const std::vector<Token>& tokens, const Match& match, std::size_t most);

  std::shared_ptr<GammaPolicy> gamma_;
  Suffixes suffixes_;
  Token last_ = -1;
};

}  // namespace specrt::native
