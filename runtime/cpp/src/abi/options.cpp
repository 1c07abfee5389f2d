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

template <auto kMember>
void unset(Params& params) {
  params.*kMember = Params().*kMember;
}

}  // namespace

const std::vector<Option>& options() {
  static const std::vector<Option> known = {
      {"max_tokens", OptionKind::kInteger, unset<&Params::max_tokens>},
      {"top_k", OptionKind::kInteger, unset<&Params::top_k>},
      {"no_repeat_ngram_size", OptionKind::kInteger, unset<&Params::no_repeat_ngram_size>},
      {"min_tokens", OptionKind::kInteger, unset<&Params::min_tokens>},
      {"seed", OptionKind::kInteger, unset<&Params::seed>},
      {"logprobs", OptionKind::kInteger, unset<&Params::logprobs>},
      {"prompt_logprobs", OptionKind::kInteger, unset<&Params::prompt_logprobs>},
      {"gamma", OptionKind::kInteger, unset<&Params::gamma>},
      {"ignore_eos", OptionKind::kInteger, unset<&Params::ignore_eos>},
      {"parse_special", OptionKind::kInteger, unset<&Params::parse_special>},
      {"temperature", OptionKind::kNumber, unset<&Params::temperature>},
      {"top_p", OptionKind::kNumber, unset<&Params::top_p>},
      {"min_p", OptionKind::kNumber, unset<&Params::min_p>},
      {"typical_p", OptionKind::kNumber, unset<&Params::typical_p>},
      {"repetition_penalty", OptionKind::kNumber, unset<&Params::repetition_penalty>},
      {"presence_penalty", OptionKind::kNumber, unset<&Params::presence_penalty>},
      {"frequency_penalty", OptionKind::kNumber, unset<&Params::frequency_penalty>},
      {"verifier", OptionKind::kText, unset<&Params::verifier>},
      {"drafter", OptionKind::kText, unset<&Params::drafter>},
      {"json_schema", OptionKind::kText, unset<&Params::json_schema>},
      {"regex", OptionKind::kText, unset<&Params::regex>},
      {"grammar", OptionKind::kText, unset<&Params::grammar>},
      {"gamma", OptionKind::kText, unset<&Params::gamma>},
      {"stop", OptionKind::kTexts, unset<&Params::stop>},
      {"bad_words", OptionKind::kTexts, unset<&Params::bad_words>},
      {"choice", OptionKind::kTexts, unset<&Params::choice>},
      {"stop_token_ids", OptionKind::kTokens, unset<&Params::stop_token_ids>},
      {"allowed_token_ids", OptionKind::kTokens, unset<&Params::allowed_token_ids>},
      {"logit_bias", OptionKind::kBias, unset<&Params::logit_bias>},
      {"logits_processors", OptionKind::kProcessors, unset<&Params::processors>},
  };
  return known;
}

bool has_option(const std::string& name, OptionKind kind) {
  const auto same = [&](const Option& option) {
    return name == option.name && kind == option.kind;
  };
  return std::any_of(options().begin(), options().end(), same);
}

const Option& option_named(const std::string& name) {
  std::set<std::string> known;
  for (const Option& option : options()) {
    if (name == option.name) return option;
    known.insert(option.name);
  }
  invalid("unknown option " + quoted(name) + did_you_mean(name, {known.begin(), known.end()}));
}

void require_option(const std::string& name, OptionKind kind) {
  if (has_option(name, kind)) return;
  invalid(name + " is " + setter(option_named(name).kind));
}

}  // namespace specrt::abi
