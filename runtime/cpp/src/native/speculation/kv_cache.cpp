#include "native/speculation/kv_cache.hpp"

#include <algorithm>

namespace specrt::native {

Output KVCache::feed(const Token* tokens, std::size_t count, std::size_t rows) {
  const std::size_t widest = engine->max_width();
  while (count > widest) {
    // The last chunk holds all scored rows, so that they come from one pass.
    const std::size_t chunk = std::min(widest, count - rows);
    engine->forward(tokens, chunk, length, 1);
    length += chunk;
    check_wanted();
    tokens += chunk;
    count -= chunk;
  }
  const Output output = engine->forward(tokens, count, length, rows);
  length += count;
  return output;
}

void KVCache::check_wanted() const {
  if (cancelled != nullptr && cancelled->load(std::memory_order_relaxed)) {
    throw Cancelled();
  }
}

}  // namespace specrt::native
