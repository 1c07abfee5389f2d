// The drafters of one session, and the policies of gamma `auto`.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "native/engine/protocol.hpp"
#include "native/sampling/noise.hpp"
#include "native/sampling/processors.hpp"
#include "native/speculation/gamma.hpp"
#include "native/speculation/kv_cache.hpp"
#include "native/speculation/round.hpp"
#include "speculation/costs.hpp"

namespace specrt::native {

using speculation::Costs;

// What one generation draws on; all of it outlives the drafter.
struct Drafting {
  std::string drafter;  // "model", "ngram", "cascade" or "none", checked
  int gamma = kAuto;    // checked
  const Params* params = nullptr;
  const Noise* noise = nullptr;
  LogitsProcessors* processors = nullptr;  // nullptr where the request has none
  KVCache* draft = nullptr;                // nullptr without a draft model
  std::size_t vocabulary = 0;              // how many ids both models know
  bool head = false;                       // whether the draft is a head
  std::size_t max_gamma = 0;               // the most tokens drafted in a round
};

// How a request chooses tokens: what is accepted differs, and what a round costs.
struct DecodingMode {
  bool greedy;
  bool processed;  // whether processors edit scores

  bool operator<(const DecodingMode& other) const {
    return std::pair(greedy, processed) < std::pair(other.greedy, other.processed);
  }
};

// The drafters of one session, and what the policies of `auto` learned, which stays from one
// generation to the next; see specrt.speculation.pool.
class DrafterPool {
 public:
  // `gammas` are those built, rising from 0.
  DrafterPool(std::vector<int> gammas, Costs costs);
  ~DrafterPool();

  std::unique_ptr<Drafter> make(const Drafting& drafting);
  // Why `auto` stopped drafting, or never began in a generation that did not draft.
  std::optional<std::string> fallback(const std::string& drafter, int gamma, const Params& params,
                                      bool has_processors, bool drafted) const;

 private:
  class Policies;
  std::unique_ptr<Policies> policies_;
};

}  // namespace specrt::native
