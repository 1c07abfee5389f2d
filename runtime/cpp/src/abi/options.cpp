#include "abi/options.hpp"

#include <algorithm>
#include <set>

#include "abi/arguments.hpp"
#include "abi/suggestion.hpp"
#include "abi/text.hpp"

namespace specrt::abi {

namespace {

const char* setter(OptionKind kind) {
  switch (kind) {
    case OptionKind::kInteger:
      return "a whole number; set it with specrt_params_set_integer";
    case OptionKind::kNumber:
      return "a number; set it with specrt_params_set_number";
    case OptionKind::kText:
      return "a text; set it with specrt_params_set_text";
    case OptionKind::kTexts:
      return "a list of texts; add to it with specrt_params_add_text";
    case OptionKind::kTokens:
      return "a list of token ids; add to it with specrt_params_add_tokens";
    case OptionKind::kBias:
      return "set by token; add to it with specrt_params_add_bias";
    case OptionKind::kProcessors:
      return "a list of functions; add to it with specrt_params_add_processor";
  }
  return "of another kind";
}

}  // namespace

const std::vector<Option>& options() {
  static const std::vector<Option> known = {
      {"max_tokens", OptionKind::kInteger},
      {"top_k", OptionKind::kInteger},
      {"no_repeat_ngram_size", OptionKind::kInteger},
      {"min_tokens", OptionKind::kInteger},
      {"seed", OptionKind::kInteger},
      {"logprobs", OptionKind::kInteger},
      {"prompt_logprobs", OptionKind::kInteger},
      {"gamma", OptionKind::kInteger},
      {"ignore_eos", OptionKind::kInteger},
      {"parse_special", OptionKind::kInteger},
      {"temperature", OptionKind::kNumber},
      {"top_p", OptionKind::kNumber},
      {"min_p", OptionKind::kNumber},
      {"typical_p", OptionKind::kNumber},
      {"repetition_penalty", OptionKind::kNumber},
      {"presence_penalty", OptionKind::kNumber},
      {"frequency_penalty", OptionKind::kNumber},
      {"verifier", OptionKind::kText},
      {"drafter", OptionKind::kText},
      {"json_schema", OptionKind::kText},
      {"regex", OptionKind::kText},
      {"grammar", OptionKind::kText},
      {"gamma", OptionKind::kText},
      {"stop", OptionKind::kTexts},
      {"bad_words", OptionKind::kTexts},
      {"choice", OptionKind::kTexts},
      {"stop_token_ids", OptionKind::kTokens},
      {"allowed_token_ids", OptionKind::kTokens},
      {"logit_bias", OptionKind::kBias},
      {"logits_processors", OptionKind::kProcessors},
  };
  return known;
}

bool has_option(const std::string& name, OptionKind kind) {
  const auto same = [&](const Option& option) {
    return name == option.name && kind == option.kind;
  };
  return std::any_of(options().begin(), options().end(), same);
}

void require_option(const std::string& name, OptionKind kind) {
  if (has_option(name, kind)) return;
  std::set<std::string> known;
  for (const Option& option : options()) {
    if (name == option.name) invalid(name + " is " + setter(option.kind));
    known.insert(option.name);
  }
  invalid("unknown option " + quoted(name) + did_you_mean(name, {known.begin(), known.end()}));
}

}  // namespace specrt::abi
