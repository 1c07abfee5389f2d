// When to draft although it does not pay: to see whether it would again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace specrt::native {

// Spaces probes by what they lose, so that all of them cost a small share of the time.
class Probes {
 public:
  // How many tokens to probe with now; none while it is too early. `loss` is what a probe is
  // expected to lose, in tokens, where none was made yet.
  int depth(double loss);
  // Wait as long as a probe's loss asks for; let the next go further if all was kept.
  void charge(std::size_t drafted, std::size_t accepted, double lost);
  // Forget the probes: drafting pays.
  void reset();

  std::int64_t idle = 0;  // rounds since anything was drafted

 private:
  std::optional<double> wait_;
  int hits_ = 0;
  int misses_ = 0;
};

// Stops asking a drafter that was unsure of its first token again and again. Such drafts cost a
// draft step and tell nothing. Rests double until these steps cost as little as probes may.
class Rests {
 public:
  // Take note of a draft whose first token was left out, and what it lost, in tokens.
  void bore(double loss);

  std::int64_t dull = 0;  // drafts in a row whose first token was left out
  double left = 0.0;      // rounds to rest for
};

}  // namespace specrt::native
