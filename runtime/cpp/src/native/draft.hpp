// Whatever proposes tokens: the protocol, and how a generation gets its drafter.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "native/engine.hpp"
#include "native/gamma.hpp"
#include "native/noise.hpp"
#include "native/round.hpp"
#include "native/rules.hpp"
#include "native/verify.hpp"

namespace specrt::native {

// A source of proposals. It may be wrong; it may not be slow.
class Drafter {
 public:
  virtual ~Drafter() = default;
  // Propose at most `room` tokens to follow the committed ones.
  virtual Proposal propose(const std::vector<Token>& tokens, std::size_t room) = 0;
  // Learn what was committed, all of it, after a round, and what the round came to.
  virtual void observe(const std::vector<Token>& tokens, const Round& round) = 0;
};

// What one generation draws on; all of it outlives the drafter.
struct Drafting {
  std::string drafter;  // "model", "ngram", "cascade" or "none", checked
  int gamma = kAuto;    // checked
  const Params* params = nullptr;
  const Noise* noise = nullptr;
  Rules* rules = nullptr;         // nullptr where the request has none
  CachedTokens* draft = nullptr;  // nullptr without a draft model
  std::size_t vocabulary = 0;     // how many ids both models know
};

// The drafters of one session, and what the policies of `auto` learned, which stays from one
// generation to the next; see specrt.drafters.
class Drafters {
 public:
  // `gammas` are those built, rising from 0; `costs` is asked once, when `auto` first needs it.
  Drafters(std::vector<int> gammas, std::function<Costs()> costs);
  ~Drafters();

  std::unique_ptr<Drafter> make(const Drafting& drafting);
  // Why speculation is off, where a limit was crossed that `auto` keeps to.
  std::optional<std::string> fallback(const std::string& drafter, int gamma, const Params& params,
                                      bool has_rules) const;

 private:
  class Policies;
  std::unique_ptr<Policies> policies_;
};

}  // namespace specrt::native
