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

// Source: Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1; Chen et al. 2023, arXiv:2302.01318.
Verdict rejection(const Proposal& proposal, const std::function<Distribution(std::size_t)>& target,
                  const Noise& noise, std::size_t position) {
  for (std::size_t i = 0; i < proposal.tokens.size(); ++i) {
    const Token token = proposal.tokens[i];
    const Distribution p = target(i);
    const Distribution* q =
        proposal.distributions.empty() ? nullptr : &proposal.distributions.at(i);
    const double allowance = p.prob(token) / (q == nullptr ? 1.0 : q->prob(token));
    if (noise.uniform(Purpose::kAccept, position + i) < allowance) continue;
    const Distribution rest = residual(p, q, token);
    return {i, rest.draw(noise, Purpose::kCorrection, position + i)};
  }
  const std::size_t last = proposal.tokens.size();
  return {last, target(last).draw(noise, Purpose::kCorrection, position + last)};
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
  // Passes are all of one width, the last begins earlier where the text is no multiple of it.
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
  const Verdict verdict = verify_rows(proposal, output, tokens.size());
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
