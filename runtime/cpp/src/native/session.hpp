// A session: engines with KV buffers of their own, and what they hold of earlier texts.
#pragma once

#include <memory>
#include <vector>

#include "implementation.hpp"
#include "native/engine/protocol.hpp"
#include "native/loading.hpp"
#include "native/speculation/kv_cache.hpp"
#include "native/speculation/pool.hpp"

namespace specrt::native {

class Session : public Slot {
 public:
  explicit Session(std::shared_ptr<LoadedBundle> shared);
  ~Session() override { --shared_->sessions; }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  std::unique_ptr<Run> begin(const Prompt& prompt, const Params& params) override;

 private:
  friend class Generation;

  std::vector<Token> prompt_tokens(const Prompt& prompt, bool parse_special) const;
  // Take up a text, with what the buffers hold of it; how much of it that is.
  std::size_t take(const std::vector<Token>& prompt, bool fresh);
  // Keep what the buffers hold of a text that is over; `sound` where no pass failed.
  void release(std::vector<Token> tokens, bool sound) noexcept;

  std::shared_ptr<LoadedBundle> shared_;
  std::unique_ptr<Engine> target_engine_;
  std::unique_ptr<Engine> draft_engine_;
  KVCache target_;
  std::unique_ptr<KVCache> draft_;
  std::vector<Token> held_;  // the buffers hold a prefix of it, as long as each cache says
  DrafterPool drafters_;
};

}  // namespace specrt::native
