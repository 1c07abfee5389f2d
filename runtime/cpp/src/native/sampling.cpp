#include "native/sampling.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "native/mass.hpp"
#include "native/nucleus.hpp"
#include "native/scores.hpp"
#include "native/typical.hpp"

namespace specrt::native {

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// Of all ids of a row, or of some where `ids` was filled, leave those that top-k and `reach` leave.
// Returns false where that is all of them, and fills in nothing.
bool leave(const float* logits, std::size_t vocabulary, float peak, const Params& params,
           double reach, std::vector<Token>& ids) {
  const bool some = reach < std::numeric_limits<double>::infinity();
  if (some) {
    const double least = static_cast<double>(peak) - reach * params.temperature;
    at_least(logits, vocabulary, static_cast<float>(least), ids);
  }
  const std::size_t size = some ? ids.size() : vocabulary;
  if (params.top_k <= 0 || static_cast<std::uint64_t>(params.top_k) >= size) return some;
  const std::size_t k = static_cast<std::size_t>(params.top_k);
  if (!some) {
    at_least(logits, vocabulary, kth_largest(logits, vocabulary, k), ids);
    return true;
  }
  std::vector<float> scores(ids.size());
  std::transform(ids.begin(), ids.end(), scores.begin(), [&](Token id) { return logits[id]; });
  const float bar = kth_largest(scores.data(), scores.size(), k);
  const auto below = [&](Token id) { return logits[id] < bar; };
  ids.erase(std::remove_if(ids.begin(), ids.end(), below), ids.end());
  return true;
}

// A score below which tokens weigh less than min-p asks for, or nothing: of a whole row the others
// need not be weighed. Below top-p all of them count.
float lowest(float peak, const Params& params) {
  if (params.top_p < 1.0) return kNone;
  const double least = params.min_p > 0.0 ? std::log(params.min_p) : -746.0;
  const double bar = static_cast<double>(peak) + params.temperature * (least - 1e-6);
  return std::nextafter(static_cast<float>(bar), kNone);
}

void normalise(Distribution& weighed) {
  const double total = sum_of(weighed.probs);
  for (double& weight : weighed.probs) weight /= total;
}

}  // namespace

double Distribution::prob(Token token) const {
  const auto at = std::lower_bound(ids.begin(), ids.end(), token);
  if (at == ids.end() || *at != token) return 0.0;
  return probs[static_cast<std::size_t>(at - ids.begin())];
}

Token Distribution::draw(const Noise& noise, Purpose purpose, std::size_t position) const {
  if (ids.empty()) throw std::logic_error("a token was asked of a distribution of none");
  const Noise::Stream stream = noise.stream(purpose, position);
  std::size_t best = 0;
  double least = -std::log(stream.uniform(ids[0])) / probs[0];
  for (std::size_t i = 1; i < ids.size(); ++i) {
    const double uniform = stream.uniform(ids[i]);
    // -ln u is above 1 - u, so that most logarithms need not be taken; the margin is more than
    // rounding comes to.
    if (1.0 - uniform > least * probs[i] * (1.0 + 1e-12)) continue;
    const double wait = -std::log(uniform) / probs[i];
    if (wait < least) {
      least = wait;
      best = i;
    }
  }
  return ids[best];
}

Distribution residual(const Distribution& target, const Distribution* draft, Token token) {
  Distribution left = target;
  std::size_t at = 0;
  for (std::size_t i = 0; i < left.ids.size(); ++i) {
    if (draft == nullptr) {
      if (left.ids[i] == token) left.probs[i] = 0.0;
      continue;
    }
    while (at < draft->ids.size() && draft->ids[at] < left.ids[i]) ++at;
    if (at < draft->ids.size() && draft->ids[at] == left.ids[i]) left.probs[i] -= draft->probs[at];
  }
  keep_where(left, [](double prob) { return prob > 0.0; });
  if (left.ids.empty()) return target;
  normalise(left);
  return left;
}

Distribution process(const float* logits, std::size_t vocabulary, const Params& params,
                     double reach) {
  const float peak = peak_of(logits, vocabulary);
  if (!std::isfinite(peak)) throw not_a_number();
  Distribution weighed;
  const bool some = leave(logits, vocabulary, peak, params, reach, weighed.ids);
  if (!some && params.top_p < 1.0) {
    weighed = nucleus_of(logits, vocabulary, peak, params.temperature, params.top_p);
  } else {
    if (!some) {
      // Growing as ids come takes longer than finding them, where all of them do.
      if (params.min_p == 0.0) weighed.ids.reserve(vocabulary);
      at_least(logits, vocabulary, lowest(peak, params), weighed.ids);
    }
    weigh(logits, peak, params.temperature, weighed);
    if (params.top_p < 1.0) keep_nucleus(weighed, params.top_p * sum_of(weighed.probs));
  }
  // The likeliest token weighs 1.
  const double least = params.min_p;
  keep_where(weighed, [least](double weight) { return weight > 0.0 && weight >= least; });
  if (params.typical_p < 1.0) keep_typical(weighed, params.typical_p);
  normalise(weighed);
  return weighed;
}

Token likeliest(const float* logits, std::size_t vocabulary) {
  const float peak = peak_of(logits, vocabulary);
  if (!(peak > kNone)) {  // NaN included
    throw Failure(SPECRT_INVALID_ARGUMENT,
                  "no token is left that the request allows here; loosen allowed_token_ids, "
                  "bad_words, no_repeat_ngram_size, min_tokens or its own processors");
  }
  return static_cast<Token>(std::find(logits, logits + vocabulary, peak) - logits);
}

Failure not_a_number() {
  return Failure(SPECRT_ENGINE,
                 "the model returned logits that are not numbers (NaN or infinite); no token was "
                 "chosen from them. Check the checkpoint, and the precision if it is below fp32");
}

}  // namespace specrt::native
