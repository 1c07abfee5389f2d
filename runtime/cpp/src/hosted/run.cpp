#include "hosted/run.hpp"

#include <cstring>

#include "hosted/gil.hpp"
#include "hosted/interpreter.hpp"

namespace specrt::hosted {
namespace {

std::vector<Token> ids_of(std::string_view packed) {
  std::vector<Token> ids(packed.size() / sizeof(Token));
  if (!ids.empty()) std::memcpy(ids.data(), packed.data(), ids.size() * sizeof(Token));
  return ids;
}

}  // namespace

HostedRun::HostedRun(const Object& run)
    : next_(attribute(run.get(), "next")),
      cancel_(attribute(run.get(), "cancel")),
      stats_(attribute(run.get(), "stats")),
      json_(attribute(run.get(), "json")) {}

HostedRun::~HostedRun() { cancel(); }

bool HostedRun::next(Chunk& chunk) {
  Gil gil;
  const Reply reply = call(next_.get());
  if (reply.size() == 1) return false;
  chunk.text = reply.bytes(1);
  chunk.ids = ids_of(reply.bytes(2));
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

std::string HostedRun::json() {
  Gil gil;
  return std::string(call(json_.get()).bytes(1));
}

}  // namespace specrt::hosted
