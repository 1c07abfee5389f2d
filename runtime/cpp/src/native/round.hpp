// What one round did: the record that drafters learn from and statistics count.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "native/logprobs.hpp"
#include "params.hpp"

namespace specrt::native {

struct Round {
  std::vector<Token> tokens;  // committed: the accepted ones and the target's own
  std::size_t drafted = 0;
  std::size_t accepted = 0;
  std::int64_t draft_ns = 0;
  std::int64_t verify_ns = 0;
  std::string source;
  std::vector<double> confidences;
  bool caught_up = false;
  std::vector<Ranked> logprobs;         // one for each token, where asked for
  std::vector<Ranked> prompt_logprobs;  // told with the first round, where asked for

  std::size_t evaluated() const { return accepted + (accepted < drafted ? 1 : 0); }
};

}  // namespace specrt::native
