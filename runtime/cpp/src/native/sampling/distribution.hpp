// From a row of logits to a distribution, and from a distribution to a token.
//
// Tokens are the ones Python chooses. Probabilities may differ in their last bits, as libraries'
// exponentials and logarithms do: a threshold that is met to 1e-12 of it may fall the other
// way (of top-p over a whole vocabulary, see nucleus_of).
#pragma once

#include <cstddef>
#include <limits>
#include <vector>

#include "failure.hpp"
#include "native/sampling/noise.hpp"
#include "params.hpp"

namespace specrt::native {

// The tokens that may come next, ascending, and how likely each is: positive, summing to 1.
struct Distribution {
  std::vector<Token> ids;
  std::vector<double> probs;

  double prob(Token token) const;
  // Gumbel-max with noise that depends on the position only; see specrt.sampling.distribution.
  Token draw(const Noise& noise, Purpose purpose, std::size_t position) const;
};

// Leave the tokens of which keep(prob) is true; called once for each, in order.
template <class Keep>
void keep_where(Distribution& distribution, const Keep& keep) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < distribution.ids.size(); ++i) {
    if (!keep(distribution.probs[i])) continue;
    distribution.ids[count] = distribution.ids[i];
    distribution.probs[count++] = distribution.probs[i];
  }
  distribution.ids.resize(count);
  distribution.probs.resize(count);
}

// norm(max(0, weight * p - q)); a draft of nullptr put all its mass on `token`.
Distribution residual(const Distribution& target, const Distribution* draft, Token token,
                      double weight = 1.0);

// The sum of min(weight * p, q): the mass of a residual is `weight` less this.
double overlap(const Distribution& target, const Distribution& draft, double weight);

// Temperature, then top-k, top-p, min-p and typical-p. `reach` leaves out tokens less likely than
// exp(-reach) of the likeliest first. Throws Failure(SPECRT_ENGINE) for logits that are not
// numbers.
Distribution process(const float* logits, std::size_t vocabulary, const Params& params,
                     double reach = std::numeric_limits<double>::infinity());

// The token of the largest score; the first of equal ones. Throws Failure(SPECRT_INVALID_ARGUMENT)
// where every token was ruled out.
Token likeliest(const float* logits, std::size_t vocabulary);

Failure not_a_number();

// Weigh the tokens of a row that `weighed.ids` names: exp((logit - peak) / temperature).
void weigh(const float* logits, float peak, double temperature, Distribution& weighed);

// Leave the fewest largest weights that sum to `mass`, at least one; of those that tie for the last
// place the lower ids. `weighed` holds weights where a distribution has probabilities.
void keep_nucleus(Distribution& weighed, double mass);

// The nucleus of a whole vocabulary, weighed. All tokens are weighed in f32 only, and those that
// may be in the nucleus again in f64. The mass of the others is therefore good to 1e-6 of the
// whole: where top-p is met that closely the nucleus may be one token larger or smaller than in
// Python, which then weighs all tokens in f64.
Distribution nucleus_of(const float* logits, std::size_t vocabulary, float peak, double temperature,
                        double top_p);

// Leave the tokens whose surprise is nearest to what is expected, up to a mass, at least one, and
// those as far off as the last one taken. `weighed` holds weights, above 0.
void keep_typical(Distribution& weighed, double mass);

struct Ranked {
  Token token;                   // the one that came
  double logprob;                // -inf where its score is
  std::size_t rank;              // 1 for the likeliest; of equal scores the lower id comes first
  std::vector<Token> ids;        // the k likeliest, falling
  std::vector<double> logprobs;  // of these
};

// What a row says of the token that came after it, and of the k likeliest; see
// specrt.sampling.distribution.
Ranked ranked(const float* logits, std::size_t vocabulary, Token token, std::size_t k);

}  // namespace specrt::native
