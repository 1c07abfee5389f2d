// A session behind its handle: one generation at a time, which others may end.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "abi/generator.hpp"
#include "abi/handles.hpp"
#include "abi/outside.hpp"
#include "abi/processor_guard.hpp"
#include "implementation.hpp"

namespace specrt::abi {

class Session : public Object {
 public:
  explicit Session(std::shared_ptr<Generator> generator);
  ~Session() override;

  // The right to call what is below `end`; throws Failure(SPECRT_BUSY) where another call has it.
  // One that only `reads` may be within a callback of the call that has it.
  class Turn {
   public:
    explicit Turn(Session& session, bool reads = false);
    Turn(Session& session, std::adopt_lock_t) : session_(session), is_first_(true) {}
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Session& session_;
    bool is_first_;
  };

  Generator& generator() { return *generator_; }

  // From any thread, without a turn. What is over, or SPECRT_ANY_GENERATION where nothing runs, is
  // left alone.
  void cancel(std::uint64_t generation = SPECRT_ANY_GENERATION);
  void close();
  // Cancel, and wait for the end; throws Failure(SPECRT_BUSY) within a callback of the generation
  // and within any processor, whose pass may be what it waits for.
  void end(std::uint64_t generation);
  // Throws Failure(SPECRT_CANCELLED) for a generation that another one followed.
  void require_current(std::uint64_t generation);

  std::uint64_t begin(const Prompt& prompt, const Params& params);
  // The next chunk, or nullptr at the end; later calls repeat how it ended.
  const specrt_chunk* next();
  // Tell of each chunk, up to the end.
  void read(specrt_callback callback, void* user);

  specrt_stats stats();
  const std::string& text();
  const std::vector<Token>& ids();
  const std::vector<specrt_logprobs>& logprobs(bool of_prompt);
  const std::string& json();

 private:
  struct Outcome {
    bool ended = false;
    specrt_status status = SPECRT_OK;
    std::string message;
  };

  bool take_turn(std::uint64_t generation);
  void require_begun() const;
  void require_given_out(std::uint64_t generation) const;  // under the lock
  void reserve();
  void arm(std::vector<HeldProcessor> processors);
  void start(std::unique_ptr<Run> run);
  bool stopped();
  bool step();
  void settle() noexcept;
  void disarm() noexcept;
  void finish();
  void log_fallback() noexcept;
  [[noreturn]] void fail(specrt_status status, const std::string& message);
  void tell_outcome() const;

  // Declared in this order so that a run goes before its slot, and that before its bundle.
  const std::shared_ptr<Generator> generator_;
  std::shared_ptr<const std::vector<HeldProcessor>> processors_;  // replaced under the lock
  std::unique_ptr<Slot> slot_;
  std::unique_ptr<Run> run_;  // kept after its end, for statistics

  std::mutex mutex_;  // for the members below; `run_` is replaced under it
  std::condition_variable changed_;
  std::thread::id owner_;         // of the turn; no thread's where nobody has it
  std::uint64_t generation_ = 0;  // the number of the latest one
  int cancelling_ = 0;            // threads in Run::cancel
  bool active_ = false;           // begun, and not at its end
  bool cancelled_ = false;
  bool closed_ = false;

  // Of the generation, for the caller that holds the turn.
  bool is_telling_ = false;  // a callback runs
  std::shared_ptr<CallbackError> thrown_ = std::make_shared<CallbackError>();
  Outcome outcome_;
  Chunk chunk_;
  specrt_chunk view_{};
  std::string text_;
  std::vector<Token> ids_;

  // What was given out last of each: a thread may read it while another goes on with the chunks.
  std::string given_text_;
  std::vector<Token> given_ids_;
  Stats stats_;
  std::vector<Logprobs> logprobs_;
  std::vector<specrt_logprobs> views_;  // of these
  std::string json_;
};

}  // namespace specrt::abi
