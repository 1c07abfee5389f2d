// Replays what the Python runtime generated, through the C interface of whichever implementation it
// is linked with: replay BUNDLE VECTORS [ONNXRUNTIME [TOKENIZER]]. Prints what differs.
#include <cstdio>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "native/json.hpp"
#include "specrt/specrt.h"

using specrt::native::Json;

namespace {

void require(specrt_status status) {
  if (status != SPECRT_OK) {
    throw std::runtime_error(std::string(specrt_status_name(status)) + ": " + specrt_last_error());
  }
}

void set_list(specrt_params* params, const std::string& name, const std::vector<Json>& items) {
  for (const Json& item : items) {
    if (item.kind() == Json::Kind::kText) {
      require(specrt_params_add_text(params, name.c_str(), item.text().data(), item.text().size()));
    } else {
      const std::int64_t id = item.integer();
      require(specrt_params_add_tokens(params, name.c_str(), &id, 1));
    }
  }
}

void set(specrt_params* params, const std::string& name, const Json& value) {
  const char* const key = name.c_str();
  switch (value.kind()) {
    case Json::Kind::kBoolean:
      return require(specrt_params_set_integer(params, key, value.boolean() ? 1 : 0));
    case Json::Kind::kInteger:
      return require(specrt_params_set_integer(params, key, value.integer()));
    case Json::Kind::kNumber:
      return require(specrt_params_set_number(params, key, value.number()));
    case Json::Kind::kText:
      return require(specrt_params_set_text(params, key, value.text().data(), value.text().size()));
    case Json::Kind::kList:
      return set_list(params, name, value.items());
    case Json::Kind::kObject:
      for (const auto& [token, bias] : value.fields()) {
        require(specrt_params_add_bias(params, std::stoll(token), bias.number()));
      }
      return;
    case Json::Kind::kNull:
      return;
  }
}

void begin(specrt_session* session, const Json& prompt, specrt_params* params) {
  if (prompt.kind() == Json::Kind::kText) {
    return require(specrt_begin(session, prompt.text().data(), prompt.text().size(), params));
  }
  std::vector<std::int64_t> ids;
  for (const Json& id : prompt.items()) {
    ids.push_back(id.integer());
  }
  require(specrt_begin_ids(session, ids.data(), ids.size(), params));
}

std::string listed(const std::vector<std::int64_t>& numbers) {
  std::string text;
  for (const std::int64_t number : numbers) {
    text += (text.empty() ? "" : " ") + std::to_string(number);
  }
  return text;
}

std::string listed(const Json& numbers) {
  std::vector<std::int64_t> found;
  for (const Json& number : numbers.items()) {
    found.push_back(number.integer());
  }
  return listed(found);
}

// One line for each chunk: its tokens, how many of them were drafted, and the counts so far.
std::string read(specrt_session* session, std::string& text) {
  std::string lines;
  for (const specrt_chunk* chunk = nullptr;;) {
    require(specrt_next(session, &chunk));
    if (chunk == nullptr) {
      return lines;
    }
    text.append(chunk->text, chunk->bytes);
    specrt_stats stats{};
    stats.size = sizeof stats;
    require(specrt_session_stats(session, &stats));
    lines += listed({chunk->ids, chunk->ids + chunk->count}) + " (" +
             std::to_string(chunk->accepted) + ") after " + std::to_string(stats.rounds) +
             " rounds " + std::to_string(stats.drafted) + " " + std::to_string(stats.evaluated) +
             " " + std::to_string(stats.accepted) + "\n";
  }
}

int differs(std::size_t number, const std::string& what, const std::string& found,
            const std::string& expected) {
  if (found == expected) {
    return 0;
  }
  std::printf("case %zu, %s:\n%s\nexpected:\n%s\n", number, what.c_str(), found.c_str(),
              expected.c_str());
  return 1;
}

// Log-probabilities of the same tokens, within what exp and log of two libraries differ.
int compare(std::size_t number, const std::string& name, const std::vector<Json>& found,
            const std::vector<Json>& expected) {
  int wrong = differs(number, name, std::to_string(found.size()), std::to_string(expected.size()));
  for (std::size_t i = 0; i < expected.size() && i < found.size(); ++i) {
    if (expected[i].is_null() || found[i].is_null()) {
      wrong += expected[i].is_null() == found[i].is_null() ? 0 : 1;
      continue;
    }
    for (const auto& [token, entry] : expected[i].fields()) {
      const Json& own = found[i].at(token);
      const double apart = own.at("logprob").number() - entry.at("logprob").number();
      wrong +=
          differs(number, name, apart < 1e-9 && apart > -1e-9 ? "" : std::to_string(apart), "");
      wrong += differs(number, name + " rank", std::to_string(own.at("rank").integer()),
                       std::to_string(entry.at("rank").integer()));
      wrong += differs(number, name + " piece", own.at("decoded_token").text(),
                       entry.at("decoded_token").text());
    }
  }
  return wrong;
}

int replay(specrt_session* session, const Json& one, std::size_t number) {
  specrt_params* params = nullptr;
  require(specrt_params_create(&params));
  for (const auto& [name, value] : one.at("params").fields()) {
    set(params, name, value);
  }
  begin(session, one.at("prompt"), params);
  require(specrt_params_close(params));
  std::string text;
  const std::string lines = read(session, text);
  specrt_stats stats{};
  stats.size = sizeof stats;
  require(specrt_session_stats(session, &stats));
  const std::int64_t* ids = nullptr;
  std::size_t count = 0;
  require(specrt_session_ids(session, &ids, &count));
  int wrong = differs(number, "ids", listed({ids, ids + count}), listed(one.at("ids")));
  wrong += differs(number, "text", text, one.at("text").text());
  wrong += differs(number, "finish reason", stats.finish_reason, one.at("finish_reason").text());
  wrong += differs(number, "cached tokens", std::to_string(stats.cached_tokens),
                   std::to_string(one.at("cached_tokens").integer()));
  if (!one.at("rounds").is_null()) {  // auto goes by the clock
    wrong += differs(number, "rounds", lines, one.at("rounds").text());
  }
  const char* json = nullptr;
  std::size_t bytes = 0;
  require(specrt_session_json(session, &json, &bytes));
  const Json told = Json::parse({json, bytes});
  wrong += differs(number, "text in JSON", told.at("text").text(), text);
  if (const Json* const expected = one.find("told"); expected != nullptr) {
    for (const char* name : {"logprobs", "prompt_logprobs"}) {
      wrong += compare(number, name, told.at(name).items(), expected->at(name).items());
    }
  }
  return wrong;
}

int run(int count, char** arguments) {
  std::ifstream file(arguments[2], std::ios::binary);
  const Json vectors = Json::parse(std::string{std::istreambuf_iterator<char>(file), {}});
  specrt_open_options options{};
  options.size = sizeof options;
  options.onnxruntime = count > 3 ? arguments[3] : nullptr;
  options.tokenizer = count > 4 ? arguments[4] : nullptr;
  specrt_generator* generator = nullptr;
  require(specrt_open(arguments[1], &options, &generator));
  specrt_session* session = nullptr;
  require(specrt_session_create(generator, &session));
  int wrong = 0;
  std::size_t number = 0;
  for (const Json& one : vectors.at("cases").items()) {
    wrong += replay(session, one, number++);
  }
  require(specrt_session_close(session));
  require(specrt_generator_close(generator));
  require(specrt_shutdown());
  std::printf("%s: %zu cases, %d differ\n", specrt_version(), number, wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) {
    std::printf("usage: replay BUNDLE VECTORS [ONNXRUNTIME [TOKENIZER]]\n");
    return 2;
  }
  try {
    return run(count, arguments);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 2;
  }
}
