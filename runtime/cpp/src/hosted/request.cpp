#include "hosted/request.hpp"

#include <cmath>
#include <cstdint>
#include <locale>
#include <sstream>

namespace specrt::hosted {
namespace {

std::string written(const std::string& text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string json = "\"";
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      json += '\\';
      json += c;
    } else if (code < 0x20) {
      json += "\\u00";
      json += kHex[code >> 4];
      json += kHex[code & 15];
    } else {
      json += c;
    }
  }
  return json + '"';
}

std::string written(std::int64_t value) { return std::to_string(value); }

std::string written(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
  std::ostringstream text;
  text.imbue(std::locale::classic());  // the application's may write a comma
  text.precision(17);
  text << value;
  return text.str();
}

template <typename Pointer>
std::string address(Pointer pointer) {
  return std::to_string(reinterpret_cast<std::uintptr_t>(pointer));
}

std::string written(const Processor& processor) {
  return '[' + address(processor.function) + ',' + address(processor.user) + ',' +
         address(processor.hold) + ']';
}

template <typename Value>
std::string written(const std::vector<Value>& values) {
  std::string json;
  for (const Value& value : values) {
    if (!json.empty()) json += ',';
    json += written(value);
  }
  return '[' + json + ']';
}

std::string written(const std::vector<std::pair<Token, double>>& bias) {
  std::string json;
  for (const auto& [token, value] : bias) {
    if (!json.empty()) json += ',';
    json += '"' + std::to_string(token) + "\":" + written(value);
  }
  return '{' + json + '}';
}

class ObjectText {
 public:
  template <typename Value>
  ObjectText& add(const char* name, const Value& value) {
    return add_json(name, written(value));
  }

  template <typename Value>
  ObjectText& add(const char* name, const std::optional<Value>& value) {
    return value ? add(name, *value) : *this;
  }

  ObjectText& add_json(const char* name, const std::string& json) {
    if (!text_.empty()) text_ += ',';
    text_ += '"' + std::string(name) + "\":" + json;
    return *this;
  }

  std::string text() const { return '{' + text_ + '}'; }

 private:
  std::string text_;
};

std::string params_json(const Params& p) {
  ObjectText json;
  json.add("max_tokens", p.max_tokens).add("temperature", p.temperature).add("top_k", p.top_k);
  json.add("top_p", p.top_p).add("min_p", p.min_p).add("typical_p", p.typical_p);
  json.add("repetition_penalty", p.repetition_penalty);
  json.add("presence_penalty", p.presence_penalty).add("frequency_penalty", p.frequency_penalty);
  json.add("no_repeat_ngram_size", p.no_repeat_ngram_size).add("logit_bias", p.logit_bias);
  json.add("bad_words", p.bad_words).add("allowed_token_ids", p.allowed_token_ids);
  json.add("min_tokens", p.min_tokens).add("json_schema", p.json_schema).add("regex", p.regex);
  if (!p.choice.empty()) json.add("choice", p.choice);
  json.add("grammar", p.grammar).add("logprobs", p.logprobs);
  json.add("prompt_logprobs", p.prompt_logprobs).add("seed", p.seed).add("stop", p.stop);
  json.add("stop_token_ids", p.stop_token_ids).add("verifier", p.verifier);
  json.add_json("ignore_eos", p.ignore_eos ? "true" : "false");
  return json.text();
}

}  // namespace

std::string request_json(const Params& params) {
  ObjectText json;
  json.add_json("params", params_json(params)).add("processors", params.processors);
  if (params.gamma) json.add("gamma", static_cast<std::int64_t>(*params.gamma));
  if (!params.drafter.empty()) json.add("drafter", params.drafter);
  if (!params.parse_special) json.add_json("parse_special", "false");
  return json.text();
}

}  // namespace specrt::hosted
