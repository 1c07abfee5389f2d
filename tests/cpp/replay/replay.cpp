// Replays what the Python runtime generated, through the C interface of whichever implementation it
// is linked with: replay BUNDLE VECTORS [ONNXRUNTIME [TOKENIZER]]. Prints what differs.
#include <cstdio>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "native/text/json.hpp"
#include "replay/compare.hpp"
#include "specrt/specrt.h"

using specrt::checks::compare;
using specrt::checks::differs;
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

specrt_status begin(specrt_session* session, const Json& prompt, specrt_params* params) {
  if (prompt.kind() == Json::Kind::kText) {
    return specrt_begin(session, prompt.text().data(), prompt.text().size(), params);
  }
  std::vector<std::int64_t> ids;
  for (const Json& id : prompt.items()) {
    ids.push_back(id.integer());
  }
  return specrt_begin_ids(session, ids.data(), ids.size(), params);
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

// Refuses to go on once a text has so many tokens.
int32_t fail_at(void* most, const std::int64_t*, std::size_t count, float*, std::size_t) {
  return count < *static_cast<std::size_t*>(most) ? 0 : 1;
}

// One line for each chunk: its tokens, how many of them were drafted, and the counts so far. The
// last says how the generation ended, where that is not well.
std::string read(specrt_session* session, std::int64_t cancel_after, std::string& text) {
  std::string lines;
  for (std::int64_t chunks = 0;; ++chunks) {
    if (chunks == cancel_after) {
      require(specrt_session_cancel(session));
    }
    const specrt_chunk* chunk = nullptr;
    const specrt_status status = specrt_next(session, &chunk);
    if (status != SPECRT_OK) {
      return lines + specrt_status_name(status);
    }
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

// What came of a generation that was begun.
int came_of(specrt_session* session, const Json& one, const std::string& place) {
  const Json* const after = one.find("cancel_after");
  std::string text;
  const std::string lines = read(session, after == nullptr ? -1 : after->integer(), text);
  specrt_stats stats{};
  stats.size = sizeof stats;
  require(specrt_session_stats(session, &stats));
  const std::int64_t* ids = nullptr;
  std::size_t count = 0;
  require(specrt_session_ids(session, &ids, &count));
  int wrong = differs(place + ", ids", listed({ids, ids + count}), listed(one.at("ids")));
  wrong += differs(place + ", text", text, one.at("text").text());
  wrong += differs(place + ", finish reason", stats.finish_reason, one.at("finish_reason").text());
  wrong += differs(place + ", cached tokens", std::to_string(stats.cached_tokens),
                   std::to_string(one.at("cached_tokens").integer()));
  if (!one.at("rounds").is_null()) {  // auto goes by the clock
    wrong += differs(place + ", rounds", lines, one.at("rounds").text());
  }
  const char* json = nullptr;
  std::size_t bytes = 0;
  require(specrt_session_json(session, &json, &bytes));
  return wrong + compare(place, Json::parse({json, bytes}), one.at("told"));
}

int replay(specrt_session* session, const Json& one, std::size_t number) {
  const std::string place = "case " + std::to_string(number);
  specrt_params* params = nullptr;
  require(specrt_params_create(&params));
  for (const auto& [name, value] : one.at("params").fields()) {
    set(params, name, value);
  }
  std::size_t most = 0;
  if (const Json* const tokens = one.find("fail_at"); tokens != nullptr) {
    most = static_cast<std::size_t>(tokens->integer());
    require(specrt_params_add_processor(params, fail_at, &most));
  }
  const specrt_status status = begin(session, one.at("prompt"), params);
  require(specrt_params_close(params));
  if (const Json* const refused = one.find("refused"); refused != nullptr) {
    return differs(place, specrt_status_name(status), refused->text());
  }
  require(status);
  return came_of(session, one, place);
}

int run(int count, char** arguments) {
  std::ifstream file(arguments[2], std::ios::binary);
  const Json vectors = Json::parse(std::string{std::istreambuf_iterator<char>(file), {}});
  specrt_open_options options{};
  options.size = sizeof options;
  options.no_prompt_cache = vectors.at("prompt_cache").boolean() ? 0 : 1;
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
