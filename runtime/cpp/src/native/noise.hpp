// Randomness without state; docs/randomness.md says it in steps.
#pragma once

#include <cstdint>

#include "params.hpp"

namespace specrt::native {

enum class Purpose : std::uint64_t { kToken = 0, kDraft = 1, kAccept = 2, kCorrection = 3 };

class Noise {
 public:
  explicit Noise(std::uint64_t seed, std::uint64_t request = 0);

  // One number in (0, 1).
  double uniform(Purpose purpose, std::uint64_t position) const;
  // Standard exponential noise of one token.
  double exponential(Purpose purpose, std::uint64_t position, Token token) const;

 private:
  std::uint64_t root_;
};

}  // namespace specrt::native
