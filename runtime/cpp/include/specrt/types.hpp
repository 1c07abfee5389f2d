// What specrt.hpp gives and takes: values, and the error it throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "specrt/specrt.h"

namespace specrt {
inline namespace v1 {

class Error : public std::runtime_error {
 public:
  Error(specrt_status status, const std::string& message)
      : std::runtime_error(message), status_(status) {}
  specrt_status status() const noexcept { return status_; }
  const char* name() const noexcept { return specrt_status_name(status_); }

 private:
  specrt_status status_;
};

// A view of token ids.
class Tokens {
 public:
  Tokens() = default;
  Tokens(const std::int64_t* ids, std::size_t count) : ids_(ids), count_(count) {}
  Tokens(const std::vector<std::int64_t>& ids) : ids_(ids.data()), count_(ids.size()) {}
  const std::int64_t* data() const { return ids_; }
  std::size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }
  const std::int64_t* begin() const { return ids_; }
  const std::int64_t* end() const { return count_ == 0 ? ids_ : ids_ + count_; }
  std::int64_t operator[](std::size_t at) const { return ids_[at]; }
  std::vector<std::int64_t> copy() const { return {begin(), end()}; }

 private:
  const std::int64_t* ids_ = nullptr;
  std::size_t count_ = 0;
};

// What one round added: text that is certain, and the tokens that arrived, of which the first
// `accepted` were drafted.
struct Chunk {
  std::string_view text;
  Tokens ids;
  std::size_t accepted = 0;
  std::uint64_t generation = 0;  // of its session
};

// How to open a bundle; see specrt_open_options.
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

// What an open bundle is; see specrt_info.
struct Info {
  std::string name;
  std::string backend;
  std::string precision;
  int max_length = 0;
  int vocabulary = 0;
  int rows = 0;
  int max_gamma = 0;
  bool has_draft = false;
  bool has_tokenizer = false;
  std::string notices;
  std::int64_t bos_token = -1;
  std::vector<std::int64_t> eos_tokens;
};

// See specrt_memory.
struct Memory {
  std::uint64_t weights_bytes = 0;
  std::uint64_t kv_bytes = 0;
  std::uint64_t resident_bytes = 0;
};

// Of one position: the token that is there, then the likeliest ones that are not it.
using Logprob = specrt_logprob;
using Logprobs = std::vector<Logprob>;

// What a generation came to; see specrt_stats.
struct Stats {
  std::uint64_t prompt_tokens = 0;
  std::uint64_t cached_tokens = 0;
  std::uint64_t completion_tokens = 0;
  std::uint64_t rounds = 0;
  std::uint64_t drafted = 0;
  std::uint64_t evaluated = 0;
  std::uint64_t accepted = 0;
  std::uint64_t emitted = 0;
  double acceptance_rate = 0;
  double draft_yield = 0;
  double tokens_per_round = 0;
  double ttft_ms = 0;
  double itl_ms = 0;
  double tokens_per_second = 0;
  std::int64_t seed = 0;
  int gamma = 0;
  std::string drafter;
  std::string finish_reason;
  std::string fallback;
  double queue_ms = 0;
};

// Told of lines for a log, SPECRT_LOG_ERROR or SPECRT_LOG_WARNING.
using Log = std::function<void(int level, std::string_view message)>;

// Edits the scores [vocabulary] of the token that follows the ids.
using LogitsProcessor = std::function<void(Tokens ids, float* scores, std::size_t vocabulary)>;

}  // namespace v1
}  // namespace specrt
