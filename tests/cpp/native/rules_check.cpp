#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "native/check.hpp"
#include "native/numbers.hpp"
#include "native/rules.hpp"

namespace specrt::checks {

using native::Json;

namespace {

// What vectors call the processors of an application by. Python's are in tests/cpp/edits.py.
std::int32_t halve(void*, const std::int64_t*, std::size_t, float* scores, std::size_t size) {
  for (std::size_t i = 0; i < size; ++i) scores[i] *= 0.5F;
  return 0;
}

std::int32_t lean(void*, const std::int64_t* ids, std::size_t count, float* scores,
                  std::size_t size) {
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += ids[i];
  scores[count % size] += 0.25F * static_cast<float>(sum % 7);
  scores[static_cast<std::size_t>(ids[count - 1])] = -std::numeric_limits<float>::infinity();
  return 0;
}

std::int32_t nothing(void*, const std::int64_t*, std::size_t, float* scores, std::size_t) {
  scores[0] = std::numeric_limits<float>::quiet_NaN();
  return 0;
}

std::int32_t boundless(void*, const std::int64_t*, std::size_t, float* scores, std::size_t size) {
  scores[size - 1] = std::numeric_limits<float>::infinity();
  return 0;
}

std::int32_t refuse(void* user, const std::int64_t*, std::size_t, float*, std::size_t) {
  return user == nullptr ? 3 : 0;
}

std::int32_t raise(void*, const std::int64_t*, std::size_t, float*, std::size_t) {
  throw std::runtime_error("the application gave up");
}

specrt_processor processor_of(const std::string& name) {
  if (name == "halve") return halve;
  if (name == "lean") return lean;
  if (name == "nothing") return nothing;
  if (name == "boundless") return boundless;
  if (name == "refuse") return refuse;
  if (name == "raise") return raise;
  throw std::runtime_error("no processor is called " + name);
}

std::vector<std::string> texts_of(const Json& values) {
  std::vector<std::string> found;
  for (const Json& value : values.items()) found.push_back(value.text());
  return found;
}

void read_lists(const std::string& name, const Json& value, Params& params) {
  if (name == "stop_token_ids") params.stop_token_ids = tokens_of(value);
  if (name == "allowed_token_ids") params.allowed_token_ids = tokens_of(value);
  if (name == "bad_words") params.bad_words = texts_of(value);
  if (name == "choice") params.choice = texts_of(value);
  if (name == "logit_bias") {
    for (const Json& pair : value.items()) {
      params.logit_bias.emplace_back(pair.items()[0].integer(), pair.items()[1].number());
    }
  }
  if (name == "processors") {
    for (const std::string& text : texts_of(value)) {
      params.processors.push_back({processor_of(text), nullptr});
    }
  }
}

Params asked(const Json& fields) {
  Params params;
  for (const auto& [name, value] : fields.fields()) {
    if (name == "repetition_penalty") params.repetition_penalty = value.number();
    if (name == "presence_penalty") params.presence_penalty = value.number();
    if (name == "frequency_penalty") params.frequency_penalty = value.number();
    if (name == "no_repeat_ngram_size") params.no_repeat_ngram_size = value.integer();
    if (name == "min_tokens") params.min_tokens = value.integer();
    if (name == "json_schema") params.json_schema = value.text();
    if (name == "regex") params.regex = value.text();
    if (name == "grammar") params.grammar = value.text();
    read_lists(name, value, params);
  }
  return params;
}

std::unique_ptr<native::Rules> rules_of(const Json& vector) {
  const Json& spelled = vector.at("spelled");
  const auto spell = [&spelled](const std::string& word) { return tokens_of(spelled.at(word)); };
  return native::rules_of(asked(vector.at("params")), spell, tokens_of(vector.at("ends")),
                          size_of(vector.at("vocabulary")));
}

int compare(const std::string& what, const Json& step, native::Rules& rules) {
  const std::vector<float> row = row_of(step);
  const std::vector<Token> path = tokens_of(step.at("path"));
  const float* edited = rules.edit(row.data(), row.size(), path.data(), path.size());
  const std::vector<double> expected = numbers_of(step.at("edited"));
  int wrong = same(what + ", scores", row.size(), expected.size());
  for (std::size_t i = 0; wrong == 0 && i < row.size(); ++i) {
    const double found = static_cast<double>(edited[i]);
    if (found != expected[i]) {
      wrong += differs(what + ", token " + std::to_string(i), shown(found), shown(expected[i]));
    }
  }
  return wrong;
}

int replay(const std::string& what, const Json& vector) {
  const auto rules = rules_of(vector);
  if (rules == nullptr) return vector.find("none") ? 0 : differs(what, "no rules", "rules");
  if (vector.find("none")) return differs(what, "rules", "no rules");
  int wrong = 0;
  int number = 0;
  for (const Json& step : vector.at("steps").items()) {
    rules->learn(tokens_of(step.at("text")));
    wrong += compare(what + ", step " + std::to_string(number++), step, *rules);
  }
  return wrong;
}

int check_failure(const std::string& what, const Json& vector) {
  const std::string said = vector.at("message").text();
  try {
    replay(what, vector);
  } catch (const Failure& failure) {
    const bool told = std::string(failure.what()).find(said) != std::string::npos;
    return (told ? 0 : differs(what, failure.what(), said)) +
           same(what + ", status", static_cast<std::uint64_t>(failure.status()),
                size_of(vector.at("status")));
  }
  return differs(what, "rules", said);
}

int check_likeliest(const Json& vector) {
  const std::vector<float> row = row_of(vector);
  const Json& token = vector.at("token");
  try {
    const Token found = native::likeliest(row.data(), row.size());
    if (!token.is_null()) return same("likeliest", found, token.integer());
    return differs("likeliest", std::to_string(found), "a failure");
  } catch (const Failure& failure) {
    const bool told = token.is_null() && failure.status() == SPECRT_INVALID_ARGUMENT;
    return told ? 0 : differs("likeliest", failure.what(), "a token");
  }
}

}  // namespace

int check_rules(const Json& vectors) {
  int wrong = 0;
  int number = 0;
  for (const Json& vector : vectors.at("cases").items()) {
    const std::string what = "case " + std::to_string(number++);
    wrong += vector.find("status") ? check_failure(what, vector) : replay(what, vector);
  }
  for (const Json& vector : vectors.at("likeliest").items()) wrong += check_likeliest(vector);
  return wrong;
}

static const Registered kRegistered("rules", check_rules);

}  // namespace specrt::checks
