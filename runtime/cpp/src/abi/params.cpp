#include "params.hpp"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>

#include "abi/arguments.hpp"
#include "abi/options.hpp"
#include "abi/suggestion.hpp"
#include "abi/text.hpp"

namespace specrt {

namespace {

using abi::invalid;
using abi::OptionKind;
using abi::quoted;
using abi::shown;

constexpr double kMostBias = 10'000;
constexpr std::int64_t kMost = INT64_MAX;

struct IntegerOption {
  const char* name;
  std::int64_t least;
  std::int64_t most;
  const char* expected;
  void (*set)(Params&, std::int64_t);
};

const IntegerOption kIntegers[] = {
    {"max_tokens", 1, kMost, "a whole number of 1 or more",
     [](Params& p, std::int64_t v) { p.max_tokens = v; }},
    {"top_k", -1, kMost, "a whole number of 1 or more, or 0 for all",
     [](Params& p, std::int64_t v) { p.top_k = std::max<std::int64_t>(v, 0); }},
    {"no_repeat_ngram_size", 0, kMost, "a whole number of 0 or more",
     [](Params& p, std::int64_t v) { p.no_repeat_ngram_size = v; }},
    {"min_tokens", 0, kMost, "a whole number of 0 or more",
     [](Params& p, std::int64_t v) { p.min_tokens = v; }},
    {"seed", INT64_MIN, kMost, "a whole number", [](Params& p, std::int64_t v) { p.seed = v; }},
    {"logprobs", 0, 64, "a whole number from 0 to 64",
     [](Params& p, std::int64_t v) { p.logprobs = v; }},
    {"prompt_logprobs", 0, 64, "a whole number from 0 to 64",
     [](Params& p, std::int64_t v) { p.prompt_logprobs = v; }},
    {"gamma", kAuto, INT_MAX, "a whole number of 0 or more, or -1 for auto",
     [](Params& p, std::int64_t v) { p.gamma = static_cast<int>(v); }},
    {"ignore_eos", 0, 1, "0 or 1", [](Params& p, std::int64_t v) { p.ignore_eos = v != 0; }},
    {"parse_special", 0, 1, "0 or 1", [](Params& p, std::int64_t v) { p.parse_special = v != 0; }},
};

struct NumberOption {
  const char* name;
  bool (*allowed)(double);
  const char* expected;
  void (*set)(Params&, double);
};

bool is_fraction(double v) { return v >= 0 && v <= 1; }
bool is_share(double v) { return v > 0 && v <= 1; }
bool is_penalty(double v) { return v >= -2 && v <= 2; }

template <auto kMember>
void put(Params& params, double value) {
  params.*kMember = value;
}

const NumberOption kNumbers[] = {
    {"temperature", [](double v) { return v >= 0; }, "a finite number of 0 or more",
     put<&Params::temperature>},
    {"top_p", is_share, "a number above 0, up to 1", put<&Params::top_p>},
    {"min_p", is_fraction, "a number from 0 to 1", put<&Params::min_p>},
    {"typical_p", is_share, "a number above 0, up to 1", put<&Params::typical_p>},
    {"repetition_penalty", [](double v) { return v >= 0.01 && v <= 100; },
     "a number from 0.01 to 100", put<&Params::repetition_penalty>},
    {"presence_penalty", is_penalty, "a number from -2 to 2", put<&Params::presence_penalty>},
    {"frequency_penalty", is_penalty, "a number from -2 to 2", put<&Params::frequency_penalty>},
};

// A structure's text; compiling longer ones takes more than a few seconds.
std::string structure(const std::string& name, std::string value, std::size_t most) {
  if (value.empty()) invalid(name + " is ''; expected a text");
  const std::size_t length = abi::characters(value);
  if (length > most) {
    invalid(name + " has " + std::to_string(length) + " characters; expected up to " +
            std::to_string(most));
  }
  return value;
}

std::string drafter(std::string value) {
  const std::vector<std::string> known = {"model", "ngram", "cascade", "none"};
  if (std::find(known.begin(), known.end(), value) != known.end()) return value;
  invalid("drafter " + quoted(value) + " is unknown" + abi::did_you_mean(value, known));
}

std::vector<std::string>& texts(Params& params, const std::string& name) {
  if (name == "stop") return params.stop;
  return name == "choice" ? params.choice : params.bad_words;
}

}  // namespace

void set_integer(Params& params, const std::string& name, std::int64_t value) {
  if (abi::has_option(name, OptionKind::kNumber)) {
    return set_number(params, name, static_cast<double>(value));
  }
  abi::require_option(name, OptionKind::kInteger);
  for (const IntegerOption& option : kIntegers) {
    if (name != option.name) continue;
    if (value < option.least || value > option.most) {
      invalid(name + " is " + std::to_string(value) + "; expected " + option.expected);
    }
    return option.set(params, value);
  }
}

void set_number(Params& params, const std::string& name, double value) {
  abi::require_option(name, OptionKind::kNumber);
  for (const NumberOption& option : kNumbers) {
    if (name != option.name) continue;
    if (!std::isfinite(value) || !option.allowed(value)) {
      invalid(name + " is " + shown(value) + "; expected " + option.expected);
    }
    return option.set(params, value);
  }
}

void set_text(Params& params, const std::string& name, std::string value) {
  abi::require_option(name, OptionKind::kText);
  if (name == "gamma") {
    if (value != "auto") invalid("gamma is " + quoted(value) + "; expected 'auto', or a number");
    params.gamma = kAuto;
  } else if (name == "verifier") {
    if (value != "match" && value != "rejection") {
      invalid("verifier is " + quoted(value) + "; expected 'match' or 'rejection'");
    }
    params.verifier = std::move(value);
  } else if (name == "drafter") {
    params.drafter = drafter(std::move(value));
  } else if (name == "json_schema") {
    params.json_schema = structure(name, std::move(value), SIZE_MAX);
  } else if (name == "regex") {
    params.regex = structure(name, std::move(value), 10'000);
  } else {
    params.grammar = structure(name, std::move(value), 50'000);
  }
}

void add_text(Params& params, const std::string& name, std::string value) {
  abi::require_option(name, OptionKind::kTexts);
  if (value.empty()) invalid(name + " holds an empty string; leave it out");
  if (name == "choice") {
    std::size_t length = abi::characters(value);
    for (const std::string& text : params.choice) length += abi::characters(text);
    constexpr std::size_t kMostChoice = 100'000;
    if (length > kMostChoice) {
      invalid("choice has " + std::to_string(length) + " characters; expected up to " +
              std::to_string(kMostChoice));
    }
  }
  if (name == "bad_words") value = abi::checked_words(name, std::move(value));
  texts(params, name).push_back(std::move(value));
}

void add_tokens(Params& params, const std::string& name, const Token* ids, std::size_t count) {
  abi::require_option(name, OptionKind::kTokens);
  for (std::size_t i = 0; i < count; ++i) {
    if (ids[i] < 0) {
      invalid(name + " holds " + std::to_string(ids[i]) + "; expected ids of the vocabulary");
    }
  }
  if (name == "stop_token_ids") {
    params.stop_token_ids.insert(params.stop_token_ids.end(), ids, ids + count);
    return;
  }
  if (count == 0 && !params.allowed_token_ids) {
    invalid("allowed_token_ids is empty; nothing could come: leave it out");
  }
  if (!params.allowed_token_ids) params.allowed_token_ids.emplace();
  params.allowed_token_ids->insert(params.allowed_token_ids->end(), ids, ids + count);
}

void add_bias(Params& params, Token token, double bias) {
  if (token < 0 || !std::isfinite(bias) || std::abs(bias) > kMostBias) {
    invalid("logit_bias holds " + std::to_string(token) + ": " + shown(bias) +
            "; expected an id of the vocabulary and a number from -10000 to 10000");
  }
  const auto same = [&](const std::pair<Token, double>& pair) { return pair.first == token; };
  const auto entry = std::find_if(params.logit_bias.begin(), params.logit_bias.end(), same);
  if (entry != params.logit_bias.end()) {
    entry->second = bias;
  } else {
    params.logit_bias.emplace_back(token, bias);
  }
}

void clear(Params& params, const std::string& name) { abi::option_named(name).clear(params); }

void check(const Params& params) {
  const std::pair<const char*, bool> structures[] = {
      {"json_schema", params.json_schema.has_value()},
      {"regex", params.regex.has_value()},
      {"choice", !params.choice.empty()},
      {"grammar", params.grammar.has_value()}};
  std::string names;
  int count = 0;
  for (const auto& [name, given] : structures) {
    if (!given) continue;
    names += (count == 0 ? "" : " and ") + std::string(name);
    ++count;
  }
  if (count > 1) invalid(names + " were given; expected one of them");
  if (count == 1 && params.ignore_eos) {
    invalid(names + " and ignore_eos were given, and a constraint ends the text; leave one out");
  }
  if (params.min_tokens && *params.min_tokens > params.max_tokens) {
    invalid("min_tokens is " + std::to_string(*params.min_tokens) +
            "; expected up to max_tokens, " + std::to_string(params.max_tokens));
  }
}

}  // namespace specrt
