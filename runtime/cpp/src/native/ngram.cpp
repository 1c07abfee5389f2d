#include "native/ngram.hpp"

#include <algorithm>
#include <utility>

namespace specrt::native {

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
    const Weight weight = gamma_->weigh(static_cast<int>(i) + 1, confidence);
    if (weight == Weight::kDrop) break;
    proposal.tokens.push_back(i < period ? tokens[match.end + i] : proposal.tokens[i - period]);
    proposal.confidences.push_back(confidence);
    if (weight == Weight::kLast) break;
  }
  if (!proposal.tokens.empty()) proposal.source = "ngram";
  return proposal;
}

}  // namespace specrt::native
