#include "native/speculation/target.hpp"

#include <algorithm>

namespace specrt::native {

Verdict match(const std::vector<Token>& drafted, const std::function<Token(std::size_t)>& choose) {
  for (std::size_t i = 0; i < drafted.size(); ++i) {
    const Token chosen = choose(i);
    if (chosen != drafted[i]) return {i, chosen};
  }
  return {drafted.size(), choose(drafted.size())};
}

namespace {

// Judges the tokens of one round. Numbers are keyed by its beginning too: those of positions that
// are not committed decided about this round, and the next one needs others for them.
class Judge {
 public:
  Judge(const Noise& noise, std::size_t position) : noise_(noise), position_(position) {}

  bool keeps(std::size_t i, double chance) const {
    return noise_.uniform(Purpose::kAccept, position_ << 16 | i) < chance;
  }
  Verdict verdict(std::size_t accepted, const Distribution& law) const {
    return {accepted, law.draw(noise_, Purpose::kCorrection, position_ + accepted)};
  }

 private:
  const Noise& noise_;
  std::size_t position_;
};

// The target's distributions, and the weight of each prefix, the empty one first: the chance that
// at least so much of the draft is accepted.
struct Weighed {
  std::vector<Distribution> laws;
  std::vector<double> weights{1.0};
};

// A prefix that the target rules out ends the draft, and one that it can say nothing about: that is
// a failure only if the text gets there.
Weighed weigh(const Proposal& proposal, const std::function<Distribution(std::size_t)>& target) {
  Weighed found;
  for (std::size_t i = 0; i < proposal.tokens.size() && found.weights.back() > 0.0; ++i) {
    try {
      found.laws.push_back(target(i));
    } catch (const Failure& failure) {
      const auto status = failure.status();
      if (status != SPECRT_ENGINE && status != SPECRT_INVALID_ARGUMENT) throw;
      break;
    }
    const Token token = proposal.tokens[i];
    const double ratio = found.laws[i].prob(token) / proposal.distributions.at(i).prob(token);
    found.weights.push_back(std::min(found.weights[i] * ratio, 1.0));
  }
  return found;
}

}  // namespace

// Source: Sun et al. 2024, arXiv:2403.10444, Algorithm 2; for certain tokens Leviathan et al. 2023,
// arXiv:2211.17192, Algorithm 1.
Verdict rejection(const Proposal& proposal, const std::function<Distribution(std::size_t)>& target,
                  const Noise& noise, std::size_t position) {
  const Judge judge(noise, position);
  const std::vector<Token>& drafted = proposal.tokens;
  if (proposal.distributions.empty()) {
    for (std::size_t i = 0; i < drafted.size(); ++i) {
      const Distribution law = target(i);
      if (!judge.keeps(i, law.prob(drafted[i])))
        return judge.verdict(i, residual(law, nullptr, drafted[i]));
    }
    return judge.verdict(drafted.size(), target(drafted.size()));
  }
  const auto [laws, weights] = weigh(proposal, target);
  std::size_t i = laws.size();
  if (i == 0 || judge.keeps(i - 1, weights[i])) return judge.verdict(i, target(i));
  while (weights[--i] < 1.0) {  // that of the empty prefix is 1
    const double left =
        std::max(weights[i] - overlap(laws[i], proposal.distributions[i], weights[i]), 0.0);
    if (judge.keeps(i - 1, left / (left + 1.0 - weights[i]))) break;
  }
  return judge.verdict(i, residual(laws[i], &proposal.distributions[i], drafted[i], weights[i]));
}

namespace {

// Most tokens of a prompt that are scored in one pass: a row of scores is a whole vocabulary.
constexpr std::size_t kScored = 64;

std::size_t power_of_two_up_to(std::size_t most) {
  std::size_t width = 1;
  while (width * 2 <= most) {
    width *= 2;
  }
  return width;
}

}  // namespace

Target::Target(KVCache& cache, const Params& params, const Noise& noise,
               LogitsProcessors* processors)
    : cache_(cache), params_(params), noise_(noise), processors_(processors) {}

std::vector<Ranked> Target::score_prompt(const std::vector<Token>& prompt) {
  // Passes are all of one width, the last begins earlier where the text is not a multiple of it.
  std::vector<Ranked> result;
  const std::size_t length = prompt.size() - 1;
  const std::size_t width =
      power_of_two_up_to(std::min({kScored, length, cache_.engine->max_width()}));
  const auto most = static_cast<std::size_t>(params_.prompt_logprobs.value_or(0));
  cache_.length = 0;
  while (cache_.length < length) {
    const std::size_t start = std::min(cache_.length, length - width);
    const Output output = cache_.engine->forward(prompt.data() + start, width, start, width);
    cache_.check_wanted();
    for (std::size_t i = cache_.length - start; i < width; ++i) {
      result.push_back(ranked(output.row(i), output.vocabulary, prompt[start + i + 1], most));
    }
    cache_.length = start + width;
  }
  return result;
}

Verdict Target::verify(const std::vector<Token>& tokens, const Proposal& proposal,
                       std::vector<Ranked>& logprobs) {
  const std::vector<Token>& drafted = proposal.tokens;
  if (processors_ != nullptr) {
    processors_->learn(tokens);
  }
  fed_.assign(tokens.begin() + static_cast<std::ptrdiff_t>(cache_.length), tokens.end());
  fed_.insert(fed_.end(), drafted.begin(), drafted.end());
  const Output output = cache_.feed(fed_, drafted.size() + 1);
  Verdict verdict;
  row_ = 0;
  try {
    verdict = verify_rows(proposal, output, tokens.size());
  } catch (const Failure&) {
    if (row_ == 0) throw;
    // A failure only if the text gets there: an accepted token may have ended it.
    verdict = {row_ - 1, drafted[row_ - 1]};
  }
  if (params_.logprobs) {
    const auto most = static_cast<std::size_t>(*params_.logprobs);
    for (std::size_t i = 0; i <= verdict.accepted; ++i) {
      const Token token = i < verdict.accepted ? drafted[i] : verdict.next;
      logprobs.push_back(ranked(output.row(i), output.vocabulary, token, most));
    }
  }
  cache_.length = tokens.size() + verdict.accepted;
  return verdict;
}

Verdict Target::verify_rows(const Proposal& proposal, const Output& output, std::size_t position) {
  if (params_.greedy() && processors_ == nullptr) {  // the argmax says it all: logits stay unread
    return match(proposal.tokens, [&](std::size_t i) {
      row_ = i;
      if (output.argmax[i] < 0) {
        throw not_a_number();
      }
      return output.argmax[i];
    });
  }
  if (params_.greedy()) {
    return match(proposal.tokens, [&](std::size_t i) {
      return likeliest(row(output, proposal, i), output.vocabulary);
    });
  }
  const auto at = [&](std::size_t i) { return distribution(output, proposal, i); };
  if (params_.verifier == "rejection") {
    return rejection(proposal, at, noise_, position);
  }
  return match(proposal.tokens,
               [&](std::size_t i) { return at(i).draw(noise_, Purpose::kToken, position + i); });
}

const float* Target::row(const Output& output, const Proposal& proposal, std::size_t i) {
  row_ = i;
  if (processors_ == nullptr) {
    return output.row(i);
  }
  if (output.argmax[i] < 0) {
    throw not_a_number();
  }
  return processors_->edit(output.row(i), output.vocabulary, proposal.tokens.data(), i);
}

Distribution Target::distribution(const Output& output, const Proposal& proposal, std::size_t i) {
  const float* const scores = row(output, proposal, i);
  try {
    return process(scores, output.vocabulary, params_);
  } catch (const Failure&) {
    if (processors_ != nullptr) {
      likeliest(scores, output.vocabulary);  // says that nothing is left, where that is the reason
    }
    throw;
  }
}

}  // namespace specrt::native
