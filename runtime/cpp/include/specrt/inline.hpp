// The longer functions of specrt.hpp, which includes this file.
#pragma once

#include "specrt/specrt.hpp"

namespace specrt {
inline namespace v1 {

inline Generator::Generator(const std::string& bundle, const OpenOptions& options) {
  const auto given = [](const std::string& text) { return text.empty() ? nullptr : text.c_str(); };
  specrt_open_options raw{};
  raw.size = sizeof raw;
  raw.threads = options.threads;
  raw.owns_process = options.owns_process ? 1 : 0;
  raw.memory_bytes = options.memory_bytes;
  raw.no_prompt_cache = options.prompt_cache ? 0 : 1;
  raw.python = given(options.python);
  raw.onnxruntime = given(options.onnxruntime);
  raw.tokenizer = given(options.tokenizer);
  raw.text_memory_bytes = options.text_memory_bytes;
  detail::check(specrt_open(bundle.c_str(), &raw, owner_.out()));
}

inline Info Generator::info() const {
  specrt_info raw{};
  raw.size = sizeof raw;
  detail::check(specrt_generator_info(get(), &raw));
  Info info;
  info.name = raw.name;
  info.backend = raw.backend;
  info.precision = raw.precision;
  info.max_length = raw.max_length;
  info.vocabulary = raw.vocabulary;
  info.rows = raw.rows;
  info.max_gamma = raw.max_gamma;
  info.has_draft = raw.has_draft != 0;
  info.has_tokenizer = raw.has_tokenizer != 0;
  info.notices = raw.notices;
  info.bos_token = raw.bos_token;
  info.eos_tokens = Tokens(raw.eos_tokens, raw.eos_count).copy();
  return info;
}

inline std::vector<std::int64_t> Generator::encode(std::string_view text) const {
  const char* const bytes = detail::address(text);
  std::vector<std::int64_t> ids(text.size() + 2);  // as many as any text of the size has, mostly
  std::size_t count = 0;
  detail::check(specrt_encode(get(), bytes, text.size(), ids.data(), ids.size(), &count));
  if (count > ids.size()) {
    ids.resize(count);
    detail::check(specrt_encode(get(), bytes, text.size(), ids.data(), ids.size(), &count));
  }
  ids.resize(count);
  return ids;
}

inline std::string Generator::decode(Tokens ids) const {
  std::size_t bytes = 0;
  detail::check(specrt_decode(get(), ids.data(), ids.size(), nullptr, 0, &bytes));
  std::string text(bytes + 1, '\0');
  detail::check(specrt_decode(get(), ids.data(), ids.size(), text.data(), text.size(), &bytes));
  text.resize(bytes);
  return text;
}

inline std::string Generator::token_bytes(std::int64_t token) const {
  std::size_t count = 0;
  detail::check(specrt_token_bytes(get(), token, nullptr, 0, &count));
  std::string bytes(count, '\0');
  detail::check(specrt_token_bytes(get(), token, bytes.data(), count, &count));
  return bytes;
}

inline Memory Generator::memory() const {
  specrt_memory raw{};
  raw.size = sizeof raw;
  detail::check(specrt_generator_memory(get(), &raw));
  return {raw.weights_bytes, raw.kv_bytes, raw.resident_bytes};
}

inline Stats Session::stats() const {
  specrt_stats raw{};
  raw.size = sizeof raw;
  detail::check(specrt_session_stats(get(), &raw));
  Stats stats;
  stats.prompt_tokens = raw.prompt_tokens;
  stats.cached_tokens = raw.cached_tokens;
  stats.completion_tokens = raw.completion_tokens;
  stats.rounds = raw.rounds;
  stats.drafted = raw.drafted;
  stats.evaluated = raw.evaluated;
  stats.accepted = raw.accepted;
  stats.emitted = raw.emitted;
  stats.acceptance_rate = raw.acceptance_rate;
  stats.draft_yield = raw.draft_yield;
  stats.tokens_per_round = raw.tokens_per_round;
  stats.ttft_ms = raw.ttft_ms;
  stats.itl_ms = raw.itl_ms;
  stats.tokens_per_second = raw.tokens_per_second;
  stats.seed = raw.seed;
  stats.gamma = raw.gamma;
  stats.drafter = raw.drafter;
  stats.finish_reason = raw.finish_reason;
  stats.fallback = raw.fallback;
  stats.queue_ms = raw.queue_ms;
  return stats;
}

}  // namespace v1
}  // namespace specrt
