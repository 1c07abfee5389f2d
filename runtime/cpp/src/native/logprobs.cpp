#include "native/logprobs.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "native/mass.hpp"
#include "native/sampling.hpp"
#include "native/scores.hpp"

namespace specrt::native {

namespace {

// The ids of the k best scores, falling; of equal ones the lower id comes first.
std::vector<Token> best_of(const float* logits, std::size_t vocabulary, std::size_t k) {
  std::vector<Token> ids;
  if (k == 0) return ids;
  at_least(logits, vocabulary, kth_largest(logits, vocabulary, k), ids);
  const auto before = [logits](Token one, Token other) {
    return logits[one] > logits[other] || (logits[one] == logits[other] && one < other);
  };
  const auto end = ids.begin() + static_cast<std::ptrdiff_t>(k);
  std::partial_sort(ids.begin(), end, ids.end(), before);
  ids.resize(k);
  return ids;
}

}  // namespace

Ranked ranked(const float* logits, std::size_t vocabulary, Token token, std::size_t k) {
  if (token < 0 || static_cast<std::uint64_t>(token) >= vocabulary) {
    throw std::out_of_range("a token was ranked that the scores do not know");
  }
  const float peak = peak_of(logits, vocabulary);
  if (!std::isfinite(peak)) throw not_a_number();
  const double top = static_cast<double>(peak);
  const double log_mass = std::log(sum_of(0, vocabulary, [logits, top](std::size_t i) {
    return std::exp(static_cast<double>(logits[i]) - top);
  }));
  const auto logprob = [=](Token id) { return (static_cast<double>(logits[id]) - top) - log_mass; };
  const float score = logits[token];
  const auto above =
      std::count_if(logits, logits + vocabulary, [score](float other) { return other > score; });
  const auto equal = std::count(logits, logits + token, score);
  Ranked found{token,
               logprob(token),
               static_cast<std::size_t>(1 + above + equal),
               best_of(logits, vocabulary, std::min(k, vocabulary)),
               {}};
  for (const Token id : found.ids) found.logprobs.push_back(logprob(id));
  return found;
}

}  // namespace specrt::native
