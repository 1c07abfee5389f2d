// Sessions on several threads of one bundle, and a bundle that is closed while they run.
#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "native/check.hpp"
#include "specrt/specrt.h"

namespace specrt::checks {

namespace {

void require(specrt_status status) {
  if (status != SPECRT_OK) throw std::runtime_error(specrt_last_error());
}

specrt_generator* opened(const native::Json& vectors) {
  specrt_open_options options{};
  options.size = sizeof options;
  options.threads = 1;
  options.onnxruntime = vectors.at("library").text().c_str();
  specrt_generator* generator = nullptr;
  require(specrt_open(vectors.at("bundle").text().c_str(), &options, &generator));
  return generator;
}

// How a generation of so many tokens ended, and what came of it.
struct Came {
  specrt_status status = SPECRT_INTERNAL;
  std::vector<std::int64_t> ids;
};

int32_t note(void* running, const specrt_chunk*) {
  *static_cast<std::atomic<bool>*>(running) = true;
  return 0;
}

Came generated(specrt_session* session, const char* drafter, std::int64_t tokens,
               std::atomic<bool>& running) {
  specrt_params* params = nullptr;
  require(specrt_params_create(&params));
  require(specrt_params_set_integer(params, "max_tokens", tokens));
  require(specrt_params_set_integer(params, "ignore_eos", 1));
  require(specrt_params_set_text(params, "gamma", "auto", 4));
  require(specrt_params_set_text(params, "drafter", drafter, std::string(drafter).size()));
  const std::vector<std::int64_t> prompt(20, 57);
  Came came;
  came.status = specrt_generate_ids(session, prompt.data(), prompt.size(), params, note, &running);
  const std::int64_t* ids = nullptr;
  std::size_t count = 0;
  if (specrt_session_ids(session, &ids, &count) == SPECRT_OK) came.ids.assign(ids, ids + count);
  require(specrt_params_close(params));
  return came;
}

specrt_session* created(specrt_generator* generator) {
  specrt_session* session = nullptr;
  require(specrt_session_create(generator, &session));
  return session;
}

// Both need to know what passes cost before anybody does.
int together(specrt_generator* generator) {
  Came came[2];
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&came, generator, i] {
      specrt_session* const session = created(generator);
      for (const char* drafter : {"model", "cascade", "ngram"}) {
        std::atomic<bool> running{false};
        came[i] = generated(session, drafter, 30, running);
      }
      require(specrt_session_close(session));
    });
  }
  for (std::thread& thread : threads) thread.join();
  const bool alike = came[0].status == SPECRT_OK && came[0].ids == came[1].ids;
  return alike && came[0].ids.size() == 30 ? 0 : differs("two threads", "texts that differ", "one");
}

// What runs ends with a status.
int ended(specrt_generator* generator, bool closes) {
  specrt_session* const session = created(generator);
  std::atomic<bool> running{false};
  Came came;
  std::thread reader([&] { came = generated(session, "model", std::int64_t{1} << 40, running); });
  while (!running) std::this_thread::yield();
  require(closes ? specrt_generator_close(generator) : specrt_session_cancel(session));
  reader.join();
  if (!closes) require(specrt_session_close(session));
  const specrt_status expected = closes ? SPECRT_CLOSED : SPECRT_CANCELLED;
  if (came.status == expected) return 0;
  return differs("ended", specrt_status_name(came.status), specrt_status_name(expected));
}

int threads(const native::Json& vectors) {
  specrt_generator* const generator = opened(vectors);
  int wrong = together(generator);
  wrong += ended(generator, false);
  wrong += together(generator);
  return wrong + ended(generator, true);
}

const Registered registered("threads", threads);

}  // namespace

}  // namespace specrt::checks
