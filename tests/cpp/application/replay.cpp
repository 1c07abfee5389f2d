#include <cstdio>
#include <fstream>
#include <iterator>

#include "application/application.hpp"
#include "native/text/json.hpp"

using specrt::native::Json;
using specrt::native::quoted;

namespace application {

namespace {

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
      for (const auto& [token, bias] : value.fields())
        require(specrt_params_add_bias(params, std::stoll(token), bias.number()));
      return;
    case Json::Kind::kNull:
      return;
  }
}

specrt_status begin(specrt_session* session, const Json& prompt, specrt_params* params) {
  if (prompt.kind() == Json::Kind::kText)
    return specrt_begin(session, prompt.text().data(), prompt.text().size(), params);
  Ids ids;
  for (const Json& id : prompt.items()) ids.push_back(id.integer());
  return specrt_begin_ids(session, ids.data(), ids.size(), params);
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
    if (chunks == cancel_after) require(specrt_session_cancel(session));
    const specrt_chunk* chunk = nullptr;
    const specrt_status status = specrt_next(session, &chunk);
    if (status != SPECRT_OK) return lines + specrt_status_name(status);
    if (chunk == nullptr) return lines;
    text.append(chunk->text, chunk->bytes);
    const specrt_stats stats = stats_of(session);
    lines += listed({chunk->ids, chunk->ids + chunk->count});
    for (const std::uint64_t number : {std::uint64_t{chunk->accepted}, stats.rounds, stats.drafted,
                                       stats.evaluated, stats.accepted})
      lines += " " + std::to_string(number);
    lines += "\n";
  }
}

void generate(specrt_session* session, const Json& request) {
  specrt_params* params = nullptr;
  require(specrt_params_create(&params));
  for (const auto& [name, value] : request.at("params").fields()) set(params, name, value);
  std::size_t most = 0;
  if (const Json* const tokens = request.find("fail_at"); tokens != nullptr) {
    most = static_cast<std::size_t>(tokens->integer());
    require(specrt_params_add_processor(params, fail_at, &most));
  }
  const specrt_status status = begin(session, request.at("prompt"), params);
  require(specrt_params_close(params));
  if (status != SPECRT_OK) {
    std::printf("{\"refused\": \"%s\"}\n", specrt_status_name(status));
    return;
  }
  const Json* const after = request.find("cancel_after");
  std::string text;
  const std::string rounds = read(session, after == nullptr ? -1 : after->integer(), text);
  const specrt_stats stats = stats_of(session);
  std::printf(
      "{\"ids\": %s, \"text\": %s, \"finish_reason\": \"%s\", \"cached_tokens\": %d, "
      "\"rounds\": %s, \"completion\": %s}\n",
      listed(ids_of(session)).c_str(), quoted(text).c_str(), stats.finish_reason,
      static_cast<int>(stats.cached_tokens), quoted(rounds).c_str(), json_of(session).c_str());
}

}  // namespace

void replay() {
  std::ifstream file(given["vectors"], std::ios::binary);
  const Json vectors = Json::parse(std::string{std::istreambuf_iterator<char>(file), {}});
  const std::vector<Json>& requests = vectors.at("requests").items();
  // Opened twice: what the first time left behind changes nothing.
  for (const std::size_t count : {std::size_t{1}, requests.size()}) {
    specrt_generator* generator = open(vectors.at("prompt_cache").boolean());
    specrt_session* session = create(generator);
    for (std::size_t i = 0; i < count; ++i) generate(session, requests[i]);
    require(specrt_session_close(session));
    require(specrt_generator_close(generator));
  }
  require(specrt_shutdown());
}

}  // namespace application
