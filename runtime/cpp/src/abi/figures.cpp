#include "abi/figures.hpp"

namespace specrt::abi {

namespace {

double ratio(std::uint64_t part, std::uint64_t whole) {
  return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

specrt_stats figures(const Stats& stats, std::size_t completion_tokens) {
  specrt_stats out{};
  out.prompt_tokens = stats.prompt_tokens;
  out.cached_tokens = stats.cached_tokens;
  out.completion_tokens = completion_tokens;
  out.rounds = stats.rounds;
  out.drafted = stats.drafted;
  out.evaluated = stats.evaluated;
  out.accepted = stats.accepted;
  out.emitted = stats.emitted;
  out.acceptance_rate = ratio(stats.accepted, stats.evaluated);
  out.draft_yield = ratio(stats.accepted, stats.drafted);
  out.tokens_per_round = ratio(stats.emitted, stats.rounds);
  out.ttft_ms = stats.ttft_ms;
  out.itl_ms = stats.itl_ms;
  out.tokens_per_second = stats.tokens_per_second;
  out.seed = stats.seed;
  out.gamma = stats.gamma;
  out.drafter = stats.drafter.c_str();
  out.finish_reason = stats.finish_reason.c_str();
  out.fallback = stats.fallback.c_str();
  out.queue_ms = stats.queue_ms;
  return out;
}

}  // namespace specrt::abi
