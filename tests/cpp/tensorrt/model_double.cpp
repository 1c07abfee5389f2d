#include <algorithm>
#include <cmath>

#include "tensorrt/double.hpp"

namespace specrt::doubles {

namespace {

std::uint64_t mixed(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

}  // namespace

int& last_profile() {
  thread_local int profile = -1;
  return profile;
}

std::vector<float> scores_after(const Id* tokens, std::size_t count, std::size_t vocabulary) {
  std::uint64_t state = 1;
  for (std::size_t i = 0; i < count; ++i)
    state = mixed(state + static_cast<std::uint64_t>(tokens[i]) + 1);
  std::vector<float> scores(vocabulary);
  for (std::size_t v = 0; v < vocabulary; ++v)
    scores[v] = static_cast<float>(mixed(state + 977 * (v + 1)) % 4096) / 512.0f;
  return scores;
}

Id likeliest(const std::vector<float>& scores) {
  return std::max_element(scores.begin(), scores.end()) - scores.begin();
}

float confidence_of(const std::vector<float>& scores) {
  const float best = *std::max_element(scores.begin(), scores.end());
  float sum = 0;
  for (const float score : scores) sum += std::exp(score - best);
  return 1 / sum;
}

}  // namespace specrt::doubles
