#include "native/nucleus.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "native/mass.hpp"
#include "native/scores.hpp"

namespace specrt::native {

namespace {

// By how much the mass of candidates must exceed top-p; that of all is good to 1e-6.
constexpr double kMargin = 1e-4;
// Below this all tokens but the likeliest weigh nothing anyway.
constexpr double kColdest = 1e-25;
// Above this all tokens weigh the same anyway, and f32 would take one over it for 0.
constexpr double kHottest = 1e37;

// Below this exp(x) is no normal number in f32, and nothing beside the likeliest's 1.
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
  const Cut found = cut(shares, mass);
  const double last = -found.rank;
  std::size_t ties = found.count;
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

}  // namespace specrt::native
