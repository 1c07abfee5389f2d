#include "native/numbers.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "native/drafting.hpp"

namespace specrt::checks {

using native::Json;

double number_of(const Json& value) {
  return value.kind() == Json::Kind::kText ? std::strtod(value.text().c_str(), nullptr)
                                           : value.number();
}

std::uint64_t whole_of(const Json& value) {
  return std::strtoull(value.text().c_str(), nullptr, 10);
}

std::size_t size_of(const Json& value) { return static_cast<std::size_t>(value.integer()); }

std::vector<double> numbers_of(const Json& values) {
  std::vector<double> found;
  for (const Json& value : values.items()) found.push_back(number_of(value));
  return found;
}

std::vector<Token> tokens_of(const Json& values) {
  std::vector<Token> found;
  for (const Json& value : values.items()) found.push_back(value.integer());
  return found;
}

std::vector<int> ints_of(const Json& values) {
  std::vector<int> found;
  for (const Json& value : values.items()) found.push_back(static_cast<int>(value.integer()));
  return found;
}

std::vector<std::string> texts_of(const Json& values) {
  std::vector<std::string> found;
  for (const Json& value : values.items()) found.push_back(value.text());
  return found;
}

std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// See `large` in tests/cpp/sampling.py.
static std::vector<float> made(const Json& fields) {
  const auto seed = static_cast<std::uint64_t>(fields.at("seed").integer());
  const auto ruled = static_cast<std::uint64_t>(fields.at("ruled").integer());
  const std::int64_t step = fields.at("step").integer();
  const double scale = fields.at("scale").number();
  std::vector<float> row(size_of(fields.at("size")));
  for (std::size_t i = 0; i < row.size(); ++i) {
    const std::uint64_t bits = mix(seed + (i + 1) * 0x9E3779B97F4A7C15);
    std::int64_t whole = 0;
    for (int at = 0; at < 64; at += 16) whole += static_cast<std::int64_t>(bits >> at & 0xFFFF);
    whole = whole / step * step;
    row[i] = static_cast<float>(static_cast<double>(whole - 131070) / 65536.0 * scale);
    if (mix(bits) % 100 < ruled) row[i] = -std::numeric_limits<float>::infinity();
  }
  return row;
}

std::vector<float> row_of(const Json& row) {
  if (const Json* fields = row.find("made")) return made(*fields);
  std::vector<float> scores;
  for (const double score : numbers_of(row.at("scores")))
    scores.push_back(static_cast<float>(score));
  return scores;
}

static void read_list(const std::string& name, const Json& value, Params& params) {
  if (name == "stop_token_ids") params.stop_token_ids = tokens_of(value);
  if (name == "allowed_token_ids") params.allowed_token_ids = tokens_of(value);
  if (name == "bad_words") params.bad_words = texts_of(value);
  if (name == "choice") params.choice = texts_of(value);
  if (name != "logit_bias") return;
  for (const Json& pair : value.items())
    params.logit_bias.emplace_back(pair.items()[0].integer(), pair.items()[1].number());
}

Params params_of(const Json& fields) {
  Params params;
  for (const auto& [name, value] : fields.fields()) {
    if (name == "temperature") params.temperature = value.number();
    if (name == "top_k") params.top_k = value.integer();
    if (name == "top_p") params.top_p = value.number();
    if (name == "min_p") params.min_p = value.number();
    if (name == "typical_p") params.typical_p = value.number();
    if (name == "repetition_penalty") params.repetition_penalty = value.number();
    if (name == "presence_penalty") params.presence_penalty = value.number();
    if (name == "frequency_penalty") params.frequency_penalty = value.number();
    if (name == "no_repeat_ngram_size") params.no_repeat_ngram_size = value.integer();
    if (name == "min_tokens") params.min_tokens = value.integer();
    if (name == "verifier") params.verifier = value.text();
    if (name == "json_schema") params.json_schema = value.text();
    if (name == "regex") params.regex = value.text();
    if (name == "grammar") params.grammar = value.text();
    read_list(name, value, params);
  }
  return params;
}

native::Costs costs_of(const Json& fields) {
  return {numbers_of(fields.at("verify")), numbers_of(fields.at("draft")),
          fields.at("outside").number()};
}

native::Distribution distribution_of(const Json& fields) {
  return {tokens_of(fields.at("ids")), numbers_of(fields.at("probs"))};
}

native::Noise noise_of(const Json& fields) {
  return native::Noise(whole_of(fields.at("seed")), whole_of(fields.at("request")));
}

bool near(double found, double expected) {
  if (found == expected) return true;
  // Numbers too small for all of their digits have an absolute rounding.
  return std::fabs(found - expected) <= 1e-12 * std::fabs(expected) + 1e-320;
}

std::string shown(double number) {
  char text[40];
  std::snprintf(text, sizeof text, "%.17g", number);
  return text;
}

std::string shown(const std::vector<Token>& ids) {
  std::string text;
  for (const Token id : ids) text += (text.empty() ? "" : " ") + std::to_string(id);
  return "[" + text + "]";
}

int same(const std::string& what, std::uint64_t found, std::uint64_t expected) {
  if (found == expected) return 0;
  return differs(what, std::to_string(found), std::to_string(expected));
}

int same(const std::string& what, Token found, Token expected) {
  return same(what, std::vector<Token>{found}, std::vector<Token>{expected});
}

int same(const std::string& what, const std::vector<Token>& found,
         const std::vector<Token>& expected) {
  return found == expected ? 0 : differs(what, shown(found), shown(expected));
}

int same(const std::string& what, const std::string& found, const std::string& expected) {
  return found == expected ? 0 : differs(what, found, expected);
}

int close(const std::string& what, double found, double expected) {
  return near(found, expected) ? 0 : differs(what, shown(found), shown(expected));
}

int equal(const std::string& what, double found, double expected) {
  return found == expected ? 0 : differs(what, shown(found), shown(expected));
}

int equal(const std::string& what, const std::vector<double>& found, const Json& expected) {
  const auto numbers = numbers_of(expected);
  int wrong = same(what + ", how many", found.size(), numbers.size());
  for (std::size_t i = 0; wrong == 0 && i < numbers.size(); ++i)
    wrong += equal(what + " " + std::to_string(i), found[i], numbers[i]);
  return wrong;
}

}  // namespace specrt::checks
