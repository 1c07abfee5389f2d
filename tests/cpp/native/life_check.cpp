// A library over its life: threads, cancelling, memory, and the application's locale.
#include <unistd.h>

#include <atomic>
#include <clocale>
#include <fstream>
#include <stdexcept>
#include <thread>
#include <vector>

#include "native/check.hpp"
#include "native/speculation/kv_cache.hpp"
#include "specrt/specrt.h"

namespace specrt::checks {

namespace {

using native::Json;

void require(specrt_status status) {
  if (status != SPECRT_OK) throw std::runtime_error(specrt_last_error());
}

specrt_generator* open_bundle(const Json& vectors) {
  specrt_open_options options{};
  options.size = sizeof options;
  options.threads = 1;
  options.onnxruntime = vectors.at("library").text().c_str();
  specrt_generator* generator = nullptr;
  require(specrt_open(vectors.at("bundle").text().c_str(), &options, &generator));
  return generator;
}

specrt_session* create_session(specrt_generator* generator) {
  specrt_session* session = nullptr;
  require(specrt_session_create(generator, &session));
  return session;
}

specrt_params* create_params(std::int64_t tokens) {
  specrt_params* params = nullptr;
  require(specrt_params_create(&params));
  require(specrt_params_set_integer(params, "max_tokens", tokens));
  require(specrt_params_set_integer(params, "ignore_eos", 1));
  return params;
}

// How a generation ended, and its tokens.
struct Outcome {
  specrt_status status = SPECRT_INTERNAL;
  std::vector<std::int64_t> ids;
};

int32_t note(void* running, const specrt_chunk*) {
  *static_cast<std::atomic<bool>*>(running) = true;
  return 0;
}

Outcome generate(specrt_session* session, const std::string& drafter, std::int64_t tokens,
                 std::atomic<bool>& running) {
  specrt_params* params = create_params(tokens);
  require(specrt_params_set_text(params, "gamma", "auto", 4));
  require(specrt_params_set_text(params, "drafter", drafter.data(), drafter.size()));
  const std::vector<std::int64_t> prompt(20, 57);
  Outcome outcome;
  outcome.status =
      specrt_generate_ids(session, prompt.data(), prompt.size(), params, note, &running);
  const std::int64_t* ids = nullptr;
  std::size_t count = 0;
  if (specrt_session_ids(session, &ids, &count) == SPECRT_OK) outcome.ids.assign(ids, ids + count);
  require(specrt_params_close(params));
  return outcome;
}

// Two sessions on threads of their own: both need the costs of passes before either knows them.
int check_together(specrt_generator* generator) {
  Outcome outcomes[2];
  std::vector<std::thread> threads;
  for (Outcome& outcome : outcomes) {
    threads.emplace_back([&outcome, generator] {
      specrt_session* const session = create_session(generator);
      for (const char* drafter : {"model", "cascade", "ngram"}) {
        std::atomic<bool> running{false};
        outcome = generate(session, drafter, 30, running);
      }
      require(specrt_session_close(session));
    });
  }
  for (std::thread& thread : threads) thread.join();
  const bool same = outcomes[0].status == SPECRT_OK && outcomes[0].ids == outcomes[1].ids;
  return same && outcomes[0].ids.size() == 30 ? 0 : differs("two threads", "two texts", "one");
}

// A generation that runs ends with a status when its session is cancelled or its bundle is closed.
int check_ended(specrt_generator* generator, bool closes) {
  specrt_session* const session = create_session(generator);
  std::atomic<bool> running{false};
  Outcome outcome;
  std::thread reader([&] { outcome = generate(session, "model", std::int64_t{1} << 40, running); });
  while (!running) std::this_thread::yield();
  require(closes ? specrt_generator_close(generator) : specrt_session_cancel(session));
  reader.join();
  if (!closes) require(specrt_session_close(session));
  const specrt_status expected = closes ? SPECRT_CLOSED : SPECRT_CANCELLED;
  if (outcome.status == expected) return 0;
  return differs("ended", specrt_status_name(outcome.status), specrt_status_name(expected));
}

int check_threads(const Json& vectors) {
  specrt_generator* const generator = open_bundle(vectors);
  int wrong = check_together(generator);
  wrong += check_ended(generator, false);
  wrong += check_together(generator);
  return wrong + check_ended(generator, true);
}

// An engine whose generation is cancelled during its second pass.
class Interrupted : public native::Engine {
 public:
  native::Output forward(const Token*, std::size_t width, std::size_t start,
                         std::size_t rows) override {
    length = start + width;
    cancelled = ++passes == 2;
    return {&argmax, nullptr, nullptr, rows, 1};
  }
  const native::Geometry& geometry() const override { return shape; }
  std::size_t max_length() const override { return 100; }
  std::size_t max_width() const override { return 4; }

  std::size_t length = 0;
  int passes = 0;
  std::atomic<bool> cancelled{false};
  Token argmax = 0;
  native::Geometry shape;
};

// The part of a cancelled prompt that was read counts.
int check_cancel(const Json&) {
  Interrupted engine;
  native::KVCache cache(engine);
  cache.cancelled = &engine.cancelled;
  const std::vector<Token> prompt(10, 1);
  try {
    cache.feed(prompt, 1);
    return differs("cancelled", "a whole prompt read", "two passes");
  } catch (const native::Cancelled&) {
  }
  const std::string found = std::to_string(cache.length) + " of " + std::to_string(engine.length);
  return found == "8 of 8" ? 0 : differs("cancelled", found, "8 of 8");
}

long resident_kib() {
  std::ifstream file("/proc/self/statm");
  long size = 0, resident = 0;
  file >> size >> resident;
  return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

// Open, generate and close; what was resident before closing.
long cycle(const Json& vectors) {
  specrt_generator* const generator = open_bundle(vectors);
  specrt_session* const session = create_session(generator);
  specrt_params* const params = create_params(8);
  require(specrt_params_set_integer(params, "gamma", 4));
  const std::vector<std::int64_t> prompt(200, 57);
  require(specrt_generate_ids(session, prompt.data(), prompt.size(), params, nullptr, nullptr));
  const long resident = resident_kib();
  require(specrt_params_close(params));
  require(specrt_session_close(session));
  require(specrt_generator_close(generator));
  return resident;
}

int check_memory(const Json& vectors) {
  const long open = cycle(vectors);
  const long first = resident_kib();
  for (std::int64_t i = 1; i < vectors.at("cycles").integer(); ++i) cycle(vectors);
  const long last = resident_kib();
  const std::string sizes = std::to_string(open) + " KiB while open, " + std::to_string(first) +
                            " closed, " + std::to_string(last) + " at last";
  if (first < open / 2 && last < first + 8 * 1024) return 0;
  return differs("memory", sizes, "half of it given back, and no growth");
}

int check_locale(const Json& vectors) {
  if (std::setlocale(LC_ALL, "") == nullptr || std::localeconv()->decimal_point[0] != ',') {
    return differs("locale", "another", "one with commas");
  }
  specrt_generator* const generator = open_bundle(vectors);
  specrt_session* const session = create_session(generator);
  specrt_params* const params = create_params(3);
  require(specrt_params_set_integer(params, "logprobs", 1));
  const std::int64_t prompt[] = {57, 58};
  require(specrt_generate_ids(session, prompt, 2, params, nullptr, nullptr));
  const char* json = nullptr;
  std::size_t bytes = 0;
  require(specrt_session_json(session, &json, &bytes));
  const std::string text(json, bytes);
  const Json completion = Json::parse(text);
  const bool sound =
      completion.at("logprobs").items().size() == 3 && completion.at("ttft_ms").number() > 0;
  require(specrt_params_close(params));
  require(specrt_generator_close(generator));
  return sound ? 0 : differs("locale", text, "logprobs and times");
}

const Registered kThreads("threads", check_threads);
const Registered kCancel("cancel", check_cancel);
const Registered kMemory("memory", check_memory);
const Registered kLocale("locale", check_locale);

}  // namespace

}  // namespace specrt::checks
