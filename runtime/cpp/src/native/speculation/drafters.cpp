#include "native/speculation/drafters.hpp"

#include <algorithm>
#include <utility>

namespace specrt::native {

// The confidence of a drafter that has none to give.
constexpr double kUnknown = 1.0;
// A draft looks at tokens down to exp(-7), a thousandth, of the likeliest: whatever distribution it
// draws from is as lossless, and the whole of a large vocabulary costs more than the draft.
constexpr double kReach = 7.0;
// Most tokens that the cache lacks after a round of the model's own: its last one, and one more.
constexpr std::size_t kOwn = 2;

ModelDrafter::ModelDrafter(const Drafting& drafting, std::shared_ptr<GammaPolicy> gamma)
    : cache_(*drafting.draft),
      params_(*drafting.params),
      noise_(*drafting.noise),
      processors_(drafting.processors),
      vocabulary_(drafting.vocabulary),
      gamma_(std::move(gamma)),
      keeps_(params_.verifier == "rejection" && !params_.greedy()),
      is_head_(drafting.head),
      usual_(is_head_ ? drafting.max_gamma + 1 : kOwn) {}

Proposal ModelDrafter::propose(const std::vector<Token>& tokens, std::size_t room) {
  const int chosen = gamma_->choose();
  if (!cache_.engine->remembers()) cache_.length = tokens.size() - 1;
  if (chosen <= 0 || room == 0 || cache_.length >= tokens.size()) return {};
  const auto lacking = tokens.begin() + static_cast<std::ptrdiff_t>(cache_.length);
  std::vector<Token> pending(lacking, tokens.end());
  if (*std::max_element(lacking, tokens.end()) >= cache_.engine->geometry().vocab_size) return {};
  Proposal proposal;
  proposal.caught_up = pending.size() > usual_;
  if (processors_) processors_->learn(tokens);
  draft(std::move(pending), tokens.size(), std::min(static_cast<std::size_t>(chosen), room),
        proposal);
  if (proposal.tokens.empty()) return {};
  proposal.distributions.resize(keeps_ ? proposal.tokens.size() : 0);
  proposal.source = "model";
  return proposal;
}

void ModelDrafter::observe(const std::vector<Token>& tokens, const Round& round) {
  cache_.length = std::min(cache_.length, tokens.size() - 1);
  gamma_->observe(round);
}

// Feed what the cache lacks, so many drafted tokens after the committed ones.
Output ModelDrafter::feed(const std::vector<Token>& pending, std::size_t position,
                          std::size_t drafted) {
  if (!is_head_ || drafted == 0) return cache_.feed(pending, 1);
  // What a head drafts that keeps nothing has no keys: it stands where the last token does.
  const std::size_t kept = cache_.engine->remembers() ? drafted : 0;
  return cache_.engine->forward_recursive(pending.front(), position + kept - 1);
}

// Feed what the cache lacks, then one drafted token at a time.
//
// After a round in which every token was accepted the cache lacks two tokens, else one; after
// rounds without this drafter it lacks theirs too, and one wider pass makes up for them. The last
// drafted token is not fed: whether it stays is not known yet.
void ModelDrafter::draft(std::vector<Token> pending, std::size_t position, std::size_t most,
                         Proposal& proposal) {
  auto& drafted = proposal.tokens;
  while (true) {
    const Output output = feed(pending, position, drafted.size());
    const auto chosen = choose(output, position + drafted.size(), proposal);
    if (!chosen) return;
    const int place = static_cast<int>(drafted.size()) + 1;
    const DraftDecision weight = gamma_->decide(place, chosen->confidence);
    if (weight == DraftDecision::kDiscard) return;
    drafted.push_back(chosen->token);
    proposal.confidences.push_back(chosen->confidence);
    if (weight == DraftDecision::kStop || drafted.size() == most) return;
    pending.assign(1, chosen->token);
    cache_.check_wanted();
  }
}

// The next token; none where there is nothing to choose by, or nothing left to choose. That ends no
// generation: the target will say so where it comes to that.
std::optional<ModelDrafter::Choice> ModelDrafter::choose(const Output& output, std::size_t position,
                                                         Proposal& proposal) {
  const bool by_argmax = params_.greedy() || processors_;
  if (by_argmax && output.argmax[0] < 0) return std::nullopt;
  try {
    return params_.greedy() ? likeliest_of(output, proposal.tokens)
                            : draw(output, position, proposal);
  } catch (const Failure& failure) {
    const auto status = failure.status();
    if (status != SPECRT_ENGINE && status != SPECRT_INVALID_ARGUMENT) throw;
    return std::nullopt;
  }
}

ModelDrafter::Choice ModelDrafter::likeliest_of(const Output& output,
                                                const std::vector<Token>& path) {
  const double confidence = output.confidence ? output.confidence[0] : kUnknown;
  if (processors_) return {likeliest(scores(output, path), vocabulary_), confidence};
  Token best = output.argmax[0];
  if (best >= static_cast<Token>(vocabulary_)) {
    const float* row = output.row(0);
    best = std::max_element(row, row + vocabulary_) - row;
  }
  return {best, confidence};
}

ModelDrafter::Choice ModelDrafter::draw(const Output& output, std::size_t position,
                                        Proposal& proposal) {
  auto distribution = process(scores(output, proposal.tokens), vocabulary_, params_, kReach);
  const auto& probs = distribution.probs;
  const double confidence = *std::max_element(probs.begin(), probs.end());
  if (!keeps_) return {distribution.draw(noise_, Purpose::kToken, position), confidence};
  // A token drafted after a rejection was never judged, and is drawn again in the next round: with
  // other noise, or the first draw would determine the second. No two rounds begin at the
  // same length.
  const std::size_t place = proposal.distributions.size();
  const Token token = distribution.draw(noise_, Purpose::kDraft, (position - place) << 16 | place);
  proposal.distributions.push_back(std::move(distribution));
  return {token, confidence};
}

// The scores as the request's processors leave them.
const float* ModelDrafter::scores(const Output& output, const std::vector<Token>& path) {
  if (!processors_) return output.row(0);
  return processors_->edit(output.row(0), vocabulary_, path.data(), path.size());
}

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
