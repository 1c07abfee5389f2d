// An engine, and how much of the text its KV buffers hold.
#pragma once

#include <algorithm>
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
  // Go back to the first `most` tokens at least; to none where the layers have forgotten too much.
  void keep(std::size_t most) {
    length = std::min(length, most);
    if (length < engine->rewind()) length = 0;
  }

  Engine* engine;
  std::size_t length;
  const std::atomic<bool>* cancelled = nullptr;
};

}  // namespace specrt::native
