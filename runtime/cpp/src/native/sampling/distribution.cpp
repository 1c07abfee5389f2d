#include "native/sampling/distribution.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "native/sampling/reductions.hpp"

namespace specrt::native {

namespace {

// By how much the mass of candidates must exceed top-p; that of all is good to 1e-6.
constexpr double kMargin = 1e-4;
// Below this all tokens but the likeliest weigh nothing anyway.
constexpr double kColdest = 1e-25;
// Above this all tokens weigh the same anyway, and f32 would take one over it for 0.
constexpr double kHottest = 1e37;

// Below this exp(x) is not a normal number in f32, and nothing next to the likeliest's 1.
constexpr float kLeast = -87.0F;

// exp(x) for x from kLeast up to 0, good to 2e-7 of it. Without a branch, so that a loop of it
// becomes vector instructions, which one over std::exp does not.
inline float rough_exp(float x) {
  // Adding 1.5 * 2^23 rounds to a whole number, which then stands in the low bits.
  const float shifted = x * 1.44269504F + 12582912.0F;
  const float whole = shifted - 12582912.0F;
  // ln 2 in two parts, the first of few bits, so that its product is exact.
  const float rest = (x - whole * 0.693359375F) + whole * 2.12194440e-4F;
  float power = 1.0F / 720.0F;
  power = power * rest + 1.0F / 120.0F;
  power = power * rest + 1.0F / 24.0F;
  power = power * rest + 1.0F / 6.0F;
  power = power * rest + 0.5F;
  power = power * rest + 1.0F;
  power = power * rest + 1.0F;
  std::uint32_t exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  exponent = (exponent + 127U) << 23;
  float scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  return power * scale;
}

// The weights of a row in f32.
class Rough {
 public:
  Rough(float peak, double temperature)
      : peak_(peak),
        temperature_(std::min(std::max(temperature, kColdest), kHottest)),
        factor_(static_cast<float>(1.0 / temperature_)) {}

  float weight(float logit) const { return rough_exp(scaled(logit)); }

  // The score from which on tokens weigh so much.
  float bar(double weight) const {
    return static_cast<float>(static_cast<double>(peak_) + temperature_ * std::log(weight));
  }

  double total(const float* logits, std::size_t size) const {
    constexpr std::size_t kLanes = 16;
    constexpr std::size_t kBlock = 32 * kLanes;
    double total = 0.0;
    float weights[kBlock];
    for (std::size_t i = 0; i < size; i += kBlock) {
      const std::size_t count = std::min(kBlock, size - i);
      std::fill(weights + count, weights + kBlock, 0.0F);
      for (std::size_t j = 0; j < count; ++j) weights[j] = scaled(logits[i + j]);
      for (std::size_t j = 0; j < count; ++j) weights[j] = rough_exp(weights[j]);
      float sums[kLanes] = {};
      for (std::size_t j = 0; j < kBlock; j += kLanes) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) sums[lane] += weights[j + lane];
      }
      for (const float sum : sums) total += static_cast<double>(sum);
    }
    return total;
  }

 private:
  float scaled(float logit) const {
    const float x = (logit - peak_) * factor_;
    return x < kLeast ? kLeast : x;
  }

  float peak_;
  double temperature_;
  float factor_;
};

// Find tokens that the nucleus is among, and return what they weigh together. Tokens below
// (1 - top_p) / V hold less than 1 - top_p together, so that the others always suffice; mostly far
// fewer do.
double candidates(const float* logits, std::size_t size, const Rough& rough, double total,
                  double top_p, std::vector<Token>& ids) {
  const double least = (1.0 - top_p) / static_cast<double>(size) * 0.999;
  double share = (1.0 - top_p) / 256;
  while (true) {
    share = std::max(share, least);
    ids.clear();
    at_least(logits, size, rough.bar(share * total), ids);
    const double mass = sum_of(0, ids.size(), [&](std::size_t i) {
      return static_cast<double>(rough.weight(logits[ids[i]]));
    });
    if (share == least || mass >= (top_p + kMargin) * total) return mass;
    share /= 16;
  }
}

}  // namespace

void weigh(const float* logits, float peak, double temperature, Distribution& weighed) {
  weighed.probs.resize(weighed.ids.size());
  for (std::size_t i = 0; i < weighed.ids.size(); ++i) {
    const double logit = static_cast<double>(logits[weighed.ids[i]]);
    weighed.probs[i] = std::exp((logit - static_cast<double>(peak)) / temperature);
  }
}

void keep_nucleus(Distribution& weighed, double mass) {
  std::vector<Share> shares;
  shares.reserve(weighed.probs.size());
  for (const double weight : weighed.probs) shares.push_back({-weight, weight});
  if (shares.empty()) return;
  const Cut result = cut(shares, mass);
  const double last = -result.rank;
  std::size_t ties = result.count;
  for (const double weight : weighed.probs) ties -= weight > last ? 1 : 0;
  keep_where(weighed, [&ties, last](double weight) {
    if (weight != last) return weight > last;
    return ties > 0 && ties-- > 0;
  });
}

Distribution nucleus_of(const float* logits, std::size_t vocabulary, float peak, double temperature,
                        double top_p) {
  const Rough rough(peak, temperature);
  const double total = rough.total(logits, vocabulary);
  Distribution weighed;
  const double mass = candidates(logits, vocabulary, rough, total, top_p, weighed.ids);
  weigh(logits, peak, temperature, weighed);
  keep_nucleus(weighed, top_p * (sum_of(weighed.probs) + std::max(0.0, total - mass)));
  return weighed;
}

void keep_typical(Distribution& weighed, double mass) {
  const std::size_t size = weighed.probs.size();
  if (size == 0) return;
  const double total = sum_of(weighed.probs);
  // Of logarithms, not of the share, which may be too small for a number.
  const double log_total = std::log(total);
  std::vector<Share> shares(size);
  for (std::size_t i = 0; i < size; ++i) {
    shares[i] = {log_total - std::log(weighed.probs[i]), weighed.probs[i] / total};
  }
  const double expected =
      sum_of(0, size, [&](std::size_t i) { return shares[i].weight * shares[i].rank; });
  std::vector<double> away(size);
  for (std::size_t i = 0; i < size; ++i) {
    away[i] = shares[i].rank = std::fabs(shares[i].rank - expected);
  }
  const double limit = cut(shares, mass).rank;
  auto next = away.begin();
  keep_where(weighed, [&next, limit](double) { return *next++ <= limit; });
}

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

namespace {

// Call visit(place in the target, the draft's share) for each token that both have.
template <class Visit>
void for_shared(const Distribution& target, const Distribution& draft, const Visit& visit) {
  auto at = target.ids.begin();  // the draft has the fewer tokens: it leaves out what is unlikely
  for (std::size_t i = 0; i < draft.ids.size(); ++i) {
    at = std::lower_bound(at, target.ids.end(), draft.ids[i]);
    if (at == target.ids.end()) return;
    if (*at == draft.ids[i])
      visit(static_cast<std::size_t>(at - target.ids.begin()), draft.probs[i]);
  }
}

}  // namespace

Distribution residual(const Distribution& target, const Distribution* draft, Token token,
                      double weight) {
  Distribution left = target;
  for (double& prob : left.probs) prob *= weight;
  if (draft == nullptr) {
    for (std::size_t i = 0; i < left.ids.size(); ++i)
      if (left.ids[i] == token) left.probs[i] = 0.0;
  } else {
    for_shared(target, *draft, [&](std::size_t i, double prob) { left.probs[i] -= prob; });
  }
  keep_where(left, [](double prob) { return prob > 0.0; });
  if (left.ids.empty()) return target;
  normalise(left);
  return left;
}

double overlap(const Distribution& target, const Distribution& draft, double weight) {
  double sum = 0.0;
  for_shared(target, draft,
             [&](std::size_t i, double prob) { sum += std::min(target.probs[i] * weight, prob); });
  return sum;
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
  Ranked result{token,
                logprob(token),
                static_cast<std::size_t>(1 + above + equal),
                best_of(logits, vocabulary, std::min(k, vocabulary)),
                {}};
  for (const Token id : result.ids) result.logprobs.push_back(logprob(id));
  return result;
}

}  // namespace specrt::native
