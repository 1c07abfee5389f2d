// From a row of logits to a distribution, and from a distribution to a token.
//
// Tokens are the ones Python chooses. Probabilities may differ in their last bits, as libraries'
// exponentials and logarithms do: a threshold that is met to 1e-12 of it may fall the other way
// (of top-p over a whole vocabulary, see nucleus.hpp).
#pragma once

#include <cstddef>
#include <limits>
#include <vector>

#include "failure.hpp"
#include "native/noise.hpp"
#include "params.hpp"

namespace specrt::native {

// The tokens that may come next, ascending, and how likely each is: positive, summing to 1.
struct Distribution {
  std::vector<Token> ids;
  std::vector<double> probs;

  double prob(Token token) const;
  // Gumbel-max with noise that depends on the position only; see specrt.sampling.
  Token draw(const Noise& noise, Purpose purpose, std::size_t position) const;
};

// Leave the tokens of which keep(prob) says so; asked once for each, in order.
template <class Keep>
void keep_where(Distribution& distribution, const Keep& keep) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < distribution.ids.size(); ++i) {
    if (!keep(distribution.probs[i])) continue;
    distribution.ids[kept] = distribution.ids[i];
    distribution.probs[kept++] = distribution.probs[i];
  }
  distribution.ids.resize(kept);
  distribution.probs.resize(kept);
}

// norm(max(0, p - q)); a draft of nullptr put all its mass on `token`.
Distribution residual(const Distribution& target, const Distribution* draft, Token token);

// Temperature, then top-k, top-p, min-p and typical-p. `reach` leaves out tokens less likely than
// exp(-reach) of the likeliest first. Throws Failure(SPECRT_ENGINE) for logits that are no numbers.
Distribution process(const float* logits, std::size_t vocabulary, const Params& params,
                     double reach = std::numeric_limits<double>::infinity());

// The token of the largest score; the first of equal ones. Throws Failure(SPECRT_INVALID_ARGUMENT)
// where every token was ruled out.
Token likeliest(const float* logits, std::size_t vocabulary);

Failure not_a_number();

}  // namespace specrt::native
