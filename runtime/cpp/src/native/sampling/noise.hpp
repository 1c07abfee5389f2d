// Randomness without state; docs/randomness.md says it in steps.
#pragma once

#include <cstdint>

#include "params.hpp"

namespace specrt::native {

enum class Purpose : std::uint64_t { kToken = 0, kDraft = 1, kAccept = 2, kCorrection = 3 };

class Noise {
 public:
  // The numbers of one purpose and position, one for each token.
  class Stream {
   public:
    explicit Stream(std::uint64_t key) : key_(key) {}

    // In (0, 1).
    double uniform(Token token) const;

   private:
    std::uint64_t key_;
  };

  explicit Noise(std::uint64_t seed, std::uint64_t request = 0);

  Stream stream(Purpose purpose, std::uint64_t position) const;
  // One number in (0, 1).
  double uniform(Purpose purpose, std::uint64_t position) const;
  // Standard exponential noise of one token.
  double exponential(Purpose purpose, std::uint64_t position, Token token) const;

 private:
  std::uint64_t root_;
};

}  // namespace specrt::native
