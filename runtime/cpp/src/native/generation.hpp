// A completion in progress: rounds, cut at ends and stop strings, delivered as chunks.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "implementation.hpp"
#include "native/completion.hpp"
#include "native/sampling/noise.hpp"
#include "native/sampling/processors.hpp"
#include "native/session.hpp"
#include "native/speculation/round.hpp"
#include "native/speculation/target.hpp"
#include "native/text/detokenizer.hpp"
#include "native/text/tokenizer.hpp"

namespace specrt::native {

class OutputProcessor {
 public:
  OutputProcessor(Completion& completion, const Params& params, const std::vector<Token>& eos,
                  const Tokenizer& tokenizer, const std::vector<Token>& prompt);

  // What a round delivers; the completion's finish reason is set where it ended the text.
  Chunk take(const Round& round, std::int64_t time_ns);
  // End a text that no end or stop string ended; what was held back of it, if anything.
  std::optional<Chunk> finish();

 private:
  std::size_t cut(const std::vector<Token>& tokens, std::string& text);
  bool show(const std::string& text, std::string& shown);

  Completion& completion_;
  std::unordered_set<Token> ends_;
  std::unordered_set<Token> eos_;
  std::unique_ptr<Detokenizer> detokenizer_;
  StopStrings stops_;
  bool one_by_one_;
};

class Generation : public Run {
 public:
  Generation(Session& session, std::vector<Token> prompt, const Params& params);
  ~Generation() override;

  bool next(Chunk& chunk) override;
  void cancel() noexcept override { cancelled_.store(true, std::memory_order_relaxed); }
  Stats stats() override { return completion_.stats(); }
  std::vector<Logprobs> logprobs(bool of_prompt) override;
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
  std::unique_ptr<LogitsProcessors> processors_;
  std::unique_ptr<Drafter> drafter_;
  Target target_;
  OutputProcessor output_;
  std::unique_ptr<Speculation> rounds_;  // nullptr once it is over
  std::deque<Chunk> chunks_;
  std::atomic<bool> cancelled_{false};
};

}  // namespace specrt::native
