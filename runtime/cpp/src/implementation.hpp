// The seam behind the C interface: what the hosted and the native implementation provide.
//
// One of them is linked in. All of them throw Failure, or std::exception for what is a bug. The
// callers see to it that a session runs one call at a time, and that nothing outlives its host.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "failure.hpp"
#include "params.hpp"

namespace specrt {

struct OpenOptions {
  int threads = 0;
  bool owns_process = false;
  std::uint64_t memory_bytes = 0;
  bool prompt_cache = true;
  std::string python;
  std::string onnxruntime;
  std::string tokenizer;
  std::uint64_t text_memory_bytes = 0;
};

struct Info {
  std::string name;
  std::string backend;
  std::string precision;
  int max_length = 0;
  int vocabulary = 0;
  int rows = 1;
  int max_gamma = 0;
  bool has_draft = false;
  bool has_tokenizer = false;
  std::string notices;
  Token bos = -1;  // -1: none
  std::vector<Token> eos;
};

struct Memory {
  std::uint64_t weights_bytes = 0;
  std::uint64_t kv_bytes = 0;  // once the buffers are full
};

// Of one position: the token that is there, then the likeliest ones that are not it.
using Logprobs = std::vector<specrt_logprob>;

using Prompt = std::variant<std::string, std::vector<Token>>;

struct Chunk {
  std::string text;
  std::vector<Token> ids;
  std::size_t accepted = 0;
};

struct Stats {
  std::uint64_t prompt_tokens = 0;
  std::uint64_t cached_tokens = 0;
  std::uint64_t rounds = 0;
  std::uint64_t drafted = 0;
  std::uint64_t evaluated = 0;
  std::uint64_t accepted = 0;
  std::uint64_t emitted = 0;
  double ttft_ms = 0;
  double itl_ms = 0;
  double tokens_per_second = 0;
  std::int64_t seed = 0;
  int gamma = kAuto;
  std::string drafter;
  std::string finish_reason;
  std::string fallback;
  double queue_ms = 0;
};

// A generation on its way.
class Run {
 public:
  virtual ~Run() = default;
  // Run until there is a chunk; false at the end. After an exception only what follows `cancel` is
  // called. Ends early, with false, once `cancel` was called.
  virtual bool next(Chunk& chunk) = 0;
  // Called from any thread, also while `next` runs; takes effect after the pass that runs.
  virtual void cancel() noexcept = 0;
  virtual Stats stats() = 0;
  // Of the tokens so far, or of the prompt's from the second on; none where they were not asked
  // for.
  virtual std::vector<Logprobs> logprobs(bool of_prompt) = 0;
  // The object that `specrt generate --json` prints.
  virtual std::string json() = 0;
};

// A place to generate in, one text at a time.
class Slot {
 public:
  virtual ~Slot() = default;
  virtual std::unique_ptr<Run> begin(const Prompt& prompt, const Params& params) = 0;
};

// An open bundle. Its functions may be called from several threads at once.
class Host {
 public:
  virtual ~Host() = default;
  virtual Info info() = 0;
  virtual std::unique_ptr<Slot> slot() = 0;
  virtual std::vector<Token> encode(const std::string& text) = 0;
  virtual std::string decode(const std::vector<Token>& ids) = 0;
  // What a token adds to a text; of special tokens nothing.
  virtual std::string token_bytes(Token token) = 0;
  virtual Memory memory() = 0;
};

std::unique_ptr<Host> open_bundle(const std::string& path, const OpenOptions& options);

// Lets go of a lock of the implementation that the calling thread holds already, for as long as the
// library is at work: what a call waits for may need it.
class LockRelease {
 public:
  LockRelease() noexcept;
  ~LockRelease();
  LockRelease(const LockRelease&) = delete;
  LockRelease& operator=(const LockRelease&) = delete;

 private:
  [[maybe_unused]] void* held_ = nullptr;  // hosted
};

// What `specrt_version` adds to the release, such as "hosted".
std::string implementation_name();

// End what the implementation started. All hosts are gone.
void shut_down();

}  // namespace specrt
