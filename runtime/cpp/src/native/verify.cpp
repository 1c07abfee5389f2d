#include "native/verify.hpp"

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

}  // namespace specrt::native
