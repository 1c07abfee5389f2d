#include "native/speculation/ngram.hpp"

#include <algorithm>
#include <utility>

namespace specrt::native {

constexpr Token kNoToken = -1;

Suffixes::Suffixes(std::size_t least, std::size_t most) : least_(least), most_(most) {
  nodes_.push_back({0, 0, kNone, kNone, kNoToken, nullptr});
}

void Suffixes::append(Token token) {
  const State ahead = after(place_, token);
  State state = grow(token);
  std::size_t length = at(state).length;
  if (length > most_) {
    // The match was full and grew: its last tokens are those of the match before, ahead by one
    // transition and, being as many again, perhaps down a link.
    length = most_;
    state = ahead;
    while (at(at(state).link).length >= length) state = at(state).link;
  }
  place_ = state;
  match_.reset();
  if (length >= least_) match_ = Match{length, at(state).recent};
  while (at(state).length >= least_) {
    at(state).recent = size_;
    state = at(state).link;
  }
}

// The state that a token leads to, or none.
Suffixes::State Suffixes::after(State state, Token token) {
  const Node& node = at(state);
  if (node.token == token) return node.next;
  if (!node.others) return kNone;
  const auto entry = node.others->find(token);
  return entry == node.others->end() ? kNone : entry->second;
}

// Add the state of the whole text, and return the one it links to.
Suffixes::State Suffixes::grow(Token token) {
  const State before = newest_;
  newest_ = static_cast<State>(nodes_.size());
  ++size_;
  nodes_.push_back({size_, size_, kNone, kNone, kNoToken, nullptr});
  at(before).token = token;
  at(before).next = newest_;
  State state = at(before).link, found = kNone;
  for (; state != kNone; state = at(state).link) {
    found = after(state, token);
    if (found != kNone) break;
    lead(state, token, newest_);
  }
  if (state == kNone) {
    found = 0;
  } else if (at(found).length != at(state).length + 1) {
    found = split(found, state, token);
  }
  at(newest_).link = found;
  return found;
}

// Move suffixes to a new state: of `whole`, those that now occurred once more. They are the ones
// that `token` leads to from `before` and from the states it links to.
Suffixes::State Suffixes::split(State whole, State before, Token token) {
  const auto added = static_cast<State>(nodes_.size());
  const Node& from = at(whole);
  Node node{at(before).length + 1, from.recent, from.link, from.next, from.token, nullptr};
  if (from.others) node.others = std::make_unique<Others>(*from.others);
  nodes_.push_back(std::move(node));
  at(whole).link = added;
  for (; before != kNone && after(before, token) == whole; before = at(before).link) {
    lead(before, token, added);
  }
  return added;
}

// Let a token lead from one state to another.
void Suffixes::lead(State state, Token token, State to) {
  Node& node = at(state);
  if (node.token == token) {
    node.next = to;
    return;
  }
  if (!node.others) node.others = std::make_unique<Others>();
  (*node.others)[token] = to;
}

// One matching token is right a quarter of the time, too seldom to pay for a wider pass; two are
// right more often than not.
constexpr std::size_t kLeast = 2;
// Of longer matches the most recent is as good as the longest.
constexpr std::size_t kMost = 16;

NgramDrafter::NgramDrafter(std::shared_ptr<GammaPolicy> gamma)
    : gamma_(std::move(gamma)), suffixes_(kLeast, kMost) {}

Proposal NgramDrafter::propose(const std::vector<Token>& tokens, std::size_t room) {
  const int chosen = gamma_->choose();
  if (chosen <= 0 || room == 0 || tokens.empty()) return {};
  read(tokens);
  const auto& match = suffixes_.longest();
  return match ? copy(tokens, *match, std::min(static_cast<std::size_t>(chosen), room))
               : Proposal{};
}

void NgramDrafter::observe(const std::vector<Token>&, const Round& round) {
  gamma_->observe(round);
}

void NgramDrafter::read(const std::vector<Token>& tokens) {
  const std::size_t known = suffixes_.size();
  if (known > tokens.size() || (known > 0 && tokens[known - 1] != last_)) {
    suffixes_ = Suffixes(kLeast, kMost);
  }
  for (std::size_t i = suffixes_.size(); i < tokens.size(); ++i) suffixes_.append(tokens[i]);
  last_ = tokens.back();
}

Proposal NgramDrafter::copy(const std::vector<Token>& tokens, const Match& match,
                            std::size_t most) {
  Proposal proposal;
  const std::size_t period = tokens.size() - match.end;
  std::size_t agreed = match.length;
  for (std::size_t i = 0; i < most; ++i, ++agreed) {
    const double confidence = static_cast<double>(agreed) / static_cast<double>(agreed + 2);
    const DraftDecision weight = gamma_->decide(static_cast<int>(i) + 1, confidence);
    if (weight == DraftDecision::kDiscard) break;
    proposal.tokens.push_back(i < period ? tokens[match.end + i] : proposal.tokens[i - period]);
    proposal.confidences.push_back(confidence);
    if (weight == DraftDecision::kStop) break;
  }
  if (!proposal.tokens.empty()) proposal.source = "ngram";
  return proposal;
}

}  // namespace specrt::native
