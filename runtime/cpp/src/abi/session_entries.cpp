// The functions of specrt.h that are about a session.
#include <string>

#include "abi/arguments.hpp"
#include "abi/call.hpp"
#include "abi/entries.hpp"
#include "abi/sized.hpp"
#include "abi/text.hpp"

using namespace specrt::abi;

namespace {

// What the structure of the first version holds.
constexpr std::size_t kLeastStats = offsetof(specrt_stats, fallback) + sizeof(char*);

// Exclusive use of a session.
template <typename Body>
specrt_status in_turn(specrt_session* session, Body&& body, bool reads = false) noexcept {
  return guarded([&] {
    const auto entry = find(session);
    const Session::Turn turn(*entry, reads);
    body(*entry);
  });
}

// The same, and within a callback too.
template <typename Body>
specrt_status reading(specrt_session* session, Body&& body) noexcept {
  return in_turn(session, body, true);
}

specrt_status read_logprobs(specrt_session* session, bool of_prompt,
                            const specrt_logprobs** logprobs, size_t* count) noexcept {
  return reading(session, [&](Session& turn) {
    require(logprobs, "logprobs");
    require(count, "count");
    const auto& all = turn.logprobs(of_prompt);
    *logprobs = all.data();
    *count = all.size();
  });
}

specrt::Params copied(specrt_params* params) {
  if (params == nullptr) return {};
  const auto entry = find(params);
  const std::lock_guard<std::mutex> lock(entry->mutex);
  return entry->values;
}

specrt::Prompt checked_prompt(const char* prompt, size_t bytes) {
  return checked_words("prompt", checked_text("prompt", prompt, bytes));
}

specrt::Prompt ids_prompt(const int64_t* ids, size_t count) {
  if (count > 0) require(ids, "ids");
  require_count("ids", count, sizeof *ids);
  std::vector<specrt::Token> copy;
  if (count > 0) copy.assign(ids, ids + count);
  return copy;
}

}  // namespace

specrt_status specrt_session_create(specrt_generator* generator, specrt_session** session) {
  return guarded([&] {
    require(session, "session");
    *session = nullptr;
    const auto opened = find(generator);
    const Handle handle = opened->admit(std::make_shared<Session>(opened));
    *session = reinterpret_cast<specrt_session*>(handle);
  });
}

specrt_status specrt_generate(specrt_session* session, const char* prompt, size_t bytes,
                              specrt_params* params, specrt_callback callback, void* user) {
  return in_turn(session, [&](Session& turn) {
    turn.begin(checked_prompt(prompt, bytes), copied(params));
    turn.read(callback, user);
  });
}

specrt_status specrt_generate_ids(specrt_session* session, const int64_t* ids, size_t count,
                                  specrt_params* params, specrt_callback callback, void* user) {
  return in_turn(session, [&](Session& turn) {
    turn.begin(ids_prompt(ids, count), copied(params));
    turn.read(callback, user);
  });
}

specrt_status specrt_begin(specrt_session* session, const char* prompt, size_t bytes,
                           specrt_params* params, uint64_t* generation) {
  return in_turn(session, [&](Session& turn) {
    require(generation, "generation");
    *generation = turn.begin(checked_prompt(prompt, bytes), copied(params));
  });
}

specrt_status specrt_begin_ids(specrt_session* session, const int64_t* ids, size_t count,
                               specrt_params* params, uint64_t* generation) {
  return in_turn(session, [&](Session& turn) {
    require(generation, "generation");
    *generation = turn.begin(ids_prompt(ids, count), copied(params));
  });
}

// What is over takes no turn, which the generation that followed may need.
specrt_status specrt_next(specrt_session* session, uint64_t generation,
                          const specrt_chunk** chunk) {
  return guarded([&] {
    const auto entry = find(session);
    require(chunk, "chunk");
    *chunk = nullptr;
    entry->require_current(generation);
    const Session::Turn turn(*entry);
    entry->require_current(generation);
    *chunk = entry->next();
  });
}

specrt_status specrt_session_cancel(specrt_session* session, uint64_t generation) {
  return guarded([&] { find(session)->cancel(generation); });
}

specrt_status specrt_session_end(specrt_session* session, uint64_t generation) {
  return guarded([&] { find(session)->end(generation); }, true);
}

specrt_status specrt_session_stats(specrt_session* session, specrt_stats* stats) {
  return reading(session, [&](Session& turn) {
    checked_size(stats, "specrt_stats", kLeastStats);
    write_sized(stats, turn.stats(), "specrt_stats", kLeastStats);
  });
}

specrt_status specrt_session_text(specrt_session* session, const char** text, size_t* bytes) {
  return reading(session, [&](Session& turn) {
    require(text, "text");
    require(bytes, "bytes");
    const std::string& result = turn.text();
    *text = result.c_str();
    *bytes = result.size();
  });
}

specrt_status specrt_session_ids(specrt_session* session, const int64_t** ids, size_t* count) {
  return reading(session, [&](Session& turn) {
    require(ids, "ids");
    require(count, "count");
    const auto& result = turn.ids();
    *ids = result.data();
    *count = result.size();
  });
}

specrt_status specrt_session_logprobs(specrt_session* session, const specrt_logprobs** logprobs,
                                      size_t* count) {
  return read_logprobs(session, false, logprobs, count);
}

specrt_status specrt_session_prompt_logprobs(specrt_session* session,
                                             const specrt_logprobs** logprobs, size_t* count) {
  return read_logprobs(session, true, logprobs, count);
}

specrt_status specrt_session_json(specrt_session* session, const char** json, size_t* bytes) {
  return reading(session, [&](Session& turn) {
    require(json, "json");
    require(bytes, "bytes");
    const std::string& result = turn.json();
    *json = result.c_str();
    *bytes = result.size();
  });
}

specrt_status specrt_session_close(specrt_session* session) {
  return guarded(
      [&] {
        if (session == nullptr) return;
        const auto entry = find(session);
        entry->close();  // first: who finds the handle closed relies on it
        entry->generator().forget(handle_of(session));
        handles().take(Kind::kSession, handle_of(session));
      },
      true);
}
