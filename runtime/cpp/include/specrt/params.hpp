// Parameters of a generation, set one after another: Params().max_tokens(64).temperature(0.8).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "specrt/detail.hpp"
#include "specrt/specrt.h"
#include "specrt/types.hpp"

namespace specrt {
inline namespace v1 {

// Throws Error for a value out of range, where it is set. Names, ranges and defaults are those of
// specrt.h.
class Params {
 public:
  Params() { detail::check(specrt_params_create(owner_.out())); }

  Params& max_tokens(std::int64_t value) { return set("max_tokens", value); }
  Params& temperature(double value) { return set("temperature", value); }
  Params& top_k(std::int64_t value) { return set("top_k", value); }
  Params& top_p(double value) { return set("top_p", value); }
  Params& min_p(double value) { return set("min_p", value); }
  Params& typical_p(double value) { return set("typical_p", value); }
  Params& repetition_penalty(double value) { return set("repetition_penalty", value); }
  Params& presence_penalty(double value) { return set("presence_penalty", value); }
  Params& frequency_penalty(double value) { return set("frequency_penalty", value); }
  Params& no_repeat_ngram_size(std::int64_t value) { return set("no_repeat_ngram_size", value); }
  Params& min_tokens(std::int64_t value) { return set("min_tokens", value); }
  Params& seed(std::int64_t value) { return set("seed", value); }
  Params& logprobs(std::int64_t value) { return set("logprobs", value); }
  Params& prompt_logprobs(std::int64_t value) { return set("prompt_logprobs", value); }
  Params& ignore_eos(bool value = true) { return set("ignore_eos", std::int64_t{value}); }
  Params& parse_special(bool value) { return set("parse_special", std::int64_t{value}); }
  Params& gamma(std::int64_t value) { return set("gamma", value); }
  Params& gamma_auto() { return set("gamma", std::string_view("auto")); }
  Params& verifier(std::string_view value) { return set("verifier", value); }
  Params& drafter(std::string_view value) { return set("drafter", value); }
  Params& json_schema(std::string_view value) { return set("json_schema", value); }
  Params& regex(std::string_view value) { return set("regex", value); }
  Params& grammar(std::string_view value) { return set("grammar", value); }

  Params& stop(std::string_view text) { return add("stop", text); }
  Params& bad_word(std::string_view text) { return add("bad_words", text); }
  Params& choice(std::string_view text) { return add("choice", text); }
  Params& stop_tokens(Tokens ids) { return add("stop_token_ids", ids); }
  Params& allowed_tokens(Tokens ids) { return add("allowed_token_ids", ids); }
  Params& bias(std::int64_t token, double value) {
    detail::check(specrt_params_add_bias(get(), token, value));
    return *this;
  }
  // Kept for as long as a generation may call it.
  Params& processor(LogitsProcessor function) {
    processors_.push_back(std::make_shared<const LogitsProcessor>(std::move(function)));
    return *this;
  }

  // By name: whole numbers, numbers, texts; lists of texts and of tokens.
  Params& set(const char* name, std::int64_t value) {
    detail::check(specrt_params_set_integer(get(), name, value));
    return *this;
  }
  Params& set(const char* name, int value) { return set(name, std::int64_t{value}); }
  Params& set(const char* name, double value) {
    detail::check(specrt_params_set_number(get(), name, value));
    return *this;
  }
  Params& set(const char* name, std::string_view text) {
    detail::check(specrt_params_set_text(get(), name, detail::address(text), text.size()));
    return *this;
  }
  Params& add(const char* name, std::string_view text) {
    detail::check(specrt_params_add_text(get(), name, detail::address(text), text.size()));
    return *this;
  }
  Params& add(const char* name, Tokens ids) {
    detail::check(specrt_params_add_tokens(get(), name, ids.data(), ids.size()));
    return *this;
  }

  // Make an option unset again, such as "stop"; or all of them.
  Params& clear(const std::string& name) {
    detail::check(specrt_params_clear(get(), name.c_str()));
    if (name == "logits_processors") processors_.clear();
    return *this;
  }
  Params& clear() {
    detail::check(specrt_params_clear(get(), nullptr));
    processors_.clear();
    return *this;
  }

  // Without what `processor` added, which each generation has in parameters of its own.
  specrt_params* get() const { return owner_.get(); }

 private:
  friend class Session;

  detail::Hooked hooked() const { return {get(), processors_}; }

  detail::Owner<specrt_params, specrt_params_close> owner_;
  detail::Processors processors_;
};

}  // namespace v1
}  // namespace specrt
