#include "hosted/run.hpp"

#include <cstring>

#include "hosted/gil.hpp"
#include "hosted/interpreter.hpp"

namespace specrt::hosted {
namespace {

template <typename Number>
std::vector<Number> unpacked(std::string_view packed) {
  std::vector<Number> numbers(packed.size() / sizeof(Number));
  if (!numbers.empty()) std::memcpy(numbers.data(), packed.data(), packed.size());
  return numbers;
}

}  // namespace

HostedRun::HostedRun(const Object& run)
    : next_(attribute(run.get(), "next")),
      cancel_(attribute(run.get(), "cancel")),
      stats_(attribute(run.get(), "stats")),
      logprobs_(attribute(run.get(), "logprobs")),
      json_(attribute(run.get(), "json")) {}

HostedRun::~HostedRun() { cancel(); }

bool HostedRun::next(Chunk& chunk) {
  Gil gil;
  const Reply reply = call(next_.get());
  if (reply.size() == 1) return false;
  chunk.text = reply.bytes(1);
  chunk.ids = unpacked<Token>(reply.bytes(2));
  chunk.accepted = static_cast<std::size_t>(reply.integer(3));
  return true;
}

void HostedRun::cancel() noexcept {
  if (!Interpreter::get().usable()) return;
  try {
    Gil gil;
    call(cancel_.get());
  } catch (const std::exception&) {
  }
}

Stats HostedRun::stats() {
  Gil gil;
  const Reply reply = call(stats_.get());
  const auto count = [&reply](std::size_t at) {
    return static_cast<std::uint64_t>(reply.integer(at));
  };
  Stats stats;
  stats.prompt_tokens = count(1);
  stats.cached_tokens = count(2);
  stats.rounds = count(3);
  stats.drafted = count(4);
  stats.evaluated = count(5);
  stats.accepted = count(6);
  stats.emitted = count(7);
  stats.ttft_ms = reply.number(8);
  stats.itl_ms = reply.number(9);
  stats.tokens_per_second = reply.number(10);
  stats.seed = reply.integer(11);
  stats.gamma = static_cast<int>(reply.integer(12));
  stats.drafter = reply.bytes(13);
  stats.finish_reason = reply.bytes(14);
  stats.fallback = reply.bytes(15);
  stats.queue_ms = reply.number(16);
  return stats;
}

std::vector<Logprobs> HostedRun::logprobs(bool of_prompt) {
  Gil gil;
  Object which = integer_of(of_prompt);
  const Reply reply = call(logprobs_.get(), {&which});
  const auto counts = unpacked<std::int64_t>(reply.bytes(1));
  const auto tokens = unpacked<Token>(reply.bytes(2)), ranks = unpacked<Token>(reply.bytes(3));
  const auto values = unpacked<double>(reply.bytes(4));
  std::vector<Logprobs> all;
  std::size_t at = 0;
  for (const std::int64_t count : counts) {
    Logprobs& one = all.emplace_back();
    for (std::int64_t i = 0; i < count; ++i, ++at)
      one.push_back({tokens[at], values[at], static_cast<std::uint64_t>(ranks[at])});
  }
  return all;
}

std::string HostedRun::json() {
  Gil gil;
  return std::string(call(json_.get()).bytes(1));
}

}  // namespace specrt::hosted
