// Lookup: an incremental suffix automaton, and a drafter that copies what followed earlier.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "native/speculation/gamma.hpp"
#include "native/speculation/pool.hpp"
#include "params.hpp"

namespace specrt::native {

// An earlier occurrence of the text's last tokens: those from end - length up to end.
struct Match {
  std::size_t length;
  std::size_t end;  // index of the token that followed it
};

// Knows, of the longest suffix that occurred before, where it did so most recently.
//
// Suffixes shorter than `least` do not count, and of longer ones only the last `most` tokens do.
// Tokens, which are no less than 0, are only ever appended: that costs O(most - least) on average
// over a text, whatever its length. A single token may cost as much as the text is long, as the
// first other one does after a long run of equal tokens.
//
// A state is a set of suffixes that have the same occurrences, all lengths between its longest and,
// exclusively, that of the state it links to. The newest state's link is the longest suffix that
// occurred before. Where a state last ended is noted only for states with suffixes of the lengths
// in use: they are a short stretch of the path of links, from the match down.
// Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text".
class Suffixes {
 public:
  // Takes 1 <= least <= most.
  Suffixes(std::size_t least, std::size_t most);

  // How many tokens the text has.
  std::size_t size() const { return size_; }
  // Append a token to the text.
  void append(Token token);
  // The most recent earlier occurrence of the longest suffix that has one.
  const std::optional<Match>& longest() const { return match_; }

 private:
  using State = std::int32_t;
  using Others = std::unordered_map<Token, State>;
  static constexpr State kNone = -1;

  // Most states have one transition, kept in place; a map for each would take several times the
  // memory of all the rest.
  struct Node {
    std::size_t length;
    std::size_t recent;
    State link;
    State next;
    Token token;
    std::unique_ptr<Others> others;
  };

  Node& at(State state) { return nodes_[static_cast<std::size_t>(state)]; }
  State after(State state, Token token);
  State grow(Token token);
  State split(State whole, State before, Token token);
  void lead(State state, Token token, State to);

  std::size_t least_;
  std::size_t most_;
  std::size_t size_ = 0;
  State newest_ = 0;
  State place_ = 0;  // the state of the match, or of its last `most` tokens
  std::optional<Match> match_;
  std::vector<Node> nodes_;  // the first one is the empty suffix; it links to nothing
};

// Copies from the prompt and from the output so far, without any model.
//
// It finds the longest suffix of the text that was there before, takes its most recent occurrence,
// and drafts the tokens that followed. Where they run up to the end of the text it goes on with the
// tokens it has just drafted, so that a text of any period continues. Where nothing matches it
// proposes nothing, and the round is a plain step.
//
// The confidence of a token is n / (n + 2) for a token that follows n tokens of
// agreement: the match, and the tokens drafted before it, which count only once they are kept. It
// is known without drawing anything, so leaving tokens out on its word is lossless under both
// verifiers. A drafted token is certain: there is no distribution.
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
