// One completion on its way.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <vector>

#include "native/completion.hpp"
#include "native/noise.hpp"
#include "native/reader.hpp"
#include "native/rules.hpp"
#include "native/session.hpp"
#include "native/speculation.hpp"
#include "native/target.hpp"

namespace specrt::native {

class Generation : public Run {
 public:
  Generation(Session& session, std::vector<Token> prompt, const Params& params);
  ~Generation() override;

  bool next(Chunk& chunk) override;
  void cancel() noexcept override { cancelled_.store(true, std::memory_order_relaxed); }
  Stats stats() override { return completion_.stats(); }
  std::string json() override;

 private:
  void deliver(Round round);
  void end(bool sound);
  void let_go(bool sound) noexcept;
  void note_cancelled();
  bool is_cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
  std::unique_ptr<Drafter> drafter();

  Session& session_;
  const Params params_;
  std::vector<Token> tokens_;  // until it is over
  std::size_t limit_ = 0;      // tokens at which it ends, whatever they say
  std::size_t cached_ = 0;     // tokens of the prompt that are not read again
  Completion completion_;
  Noise noise_;
  std::unique_ptr<Rules> rules_;
  std::unique_ptr<Drafter> drafter_;
  Target target_;
  Reader reader_;
  std::unique_ptr<Speculation> rounds_;  // nullptr once it is over
  std::deque<Chunk> chunks_;
  std::atomic<bool> cancelled_{false};
};

}  // namespace specrt::native
