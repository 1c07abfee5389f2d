#include "native/sampling/noise.hpp"

#include <cmath>

namespace specrt::native {

namespace {

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;

// SplitMix64's output function (Steele, Lea and Flood 2014).
inline std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

}  // namespace

// Requests count downwards from the root, as purposes count upwards: no request is keyed as one.
Noise::Noise(std::uint64_t seed, std::uint64_t request)
    : root_(request == 0 ? mix(seed) : mix(mix(seed) - kGolden * request)) {}

Noise::Stream Noise::stream(Purpose purpose, std::uint64_t position) const {
  const std::uint64_t of_purpose = mix(root_ + kGolden * (static_cast<std::uint64_t>(purpose) + 1));
  return Stream(mix(of_purpose + kGolden * (position + 1)));
}

double Noise::Stream::uniform(Token token) const {
  const std::uint64_t bits = mix(key_ + kGolden * (static_cast<std::uint64_t>(token) + 1));
  // 52 bits, not 53: with a half added, one more bit would round to 1 at the top.
  return (static_cast<double>(static_cast<std::int64_t>(bits >> 12)) + 0.5) * 0x1p-52;
}

double Noise::uniform(Purpose purpose, std::uint64_t position) const {
  return stream(purpose, position).uniform(0);
}

double Noise::exponential(Purpose purpose, std::uint64_t position, Token token) const {
  return -std::log(stream(purpose, position).uniform(token));
}

}  // namespace specrt::native
