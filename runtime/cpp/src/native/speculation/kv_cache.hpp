// An engine, and how much of the text its KV buffers hold.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <vector>

#include "native/engine/protocol.hpp"
#include "params.hpp"

namespace specrt::native {

// Thrown between the passes of a cancelled generation.
class Cancelled : public std::exception {
 public:
  const char* what() const noexcept override { return "the generation was cancelled"; }
};

// An engine, and how many of the committed tokens its KV buffers hold: a prefix of them that never
// includes the last one once a round is over. See specrt.speculation.kv_cache.KVCache.
class KVCache {
 public:
  explicit KVCache(Engine& its, std::size_t held = 0) : engine(&its), length(held) {}

  // Append tokens, in chunks where they are many, and score the last rows. Throws Cancelled between
  // chunks.
  Output feed(const Token* tokens, std::size_t count, std::size_t rows);
  Output feed(const std::vector<Token>& tokens, std::size_t rows) {
    return feed(tokens.data(), tokens.size(), rows);
  }
  void check_wanted() const;

  Engine* engine;
  std::size_t length;
  const std::atomic<bool>* cancelled = nullptr;
};

}  // namespace specrt::native
