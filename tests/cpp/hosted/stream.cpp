// Opens a bundle in a program that has no Python of its own, and says what came as JSON lines.
//
//   stream BUNDLE CASE [PYTHON]
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "common.hpp"

using namespace hosted;

namespace {

// Stream greedy and sampled text; the chunks together must be the text.
void stream(specrt_generator* generator) {
  specrt_session* session = nullptr;
  expect(specrt_session_create(generator, &session));
  for (const double temperature : {0.0, 0.8}) {
    specrt_params* params = params_of(24, temperature);
    std::string text;
    begin(session, params);
    const specrt_chunk* chunk = nullptr;
    expect(specrt_next(session, &chunk));
    while (chunk != nullptr) {
      text.append(chunk->text, chunk->bytes);
      expect(specrt_next(session, &chunk));
    }
    const char* whole = nullptr;
    size_t bytes = 0;
    expect(specrt_session_text(session, &whole, &bytes));
    if (text != std::string(whole, bytes)) std::exit(1);
    print_json(session);
    expect(specrt_params_close(params));
  }
  expect(specrt_session_close(session));
}

void twice() {
  for (int time = 0; time < 2; ++time) {
    specrt_generator* generator = open_one();
    stream(generator);
    expect(specrt_generator_close(generator));
  }
  expect(specrt_shutdown());
  specrt_generator* none = nullptr;
  if (specrt_open(bundle, nullptr, &none) == SPECRT_OK) std::exit(1);
  std::printf("%s\n", specrt_last_error());
}

// Leave while a bundle is open and a text half read.
void leave() {
  specrt_session* session = nullptr;
  expect(specrt_session_create(open_one(), &session));
  begin(session, params_of(24, 0.0));
  const specrt_chunk* chunk = nullptr;
  expect(specrt_next(session, &chunk));
  std::printf("%d\n", chunk != nullptr);
}

// Cancel from another thread while this one generates.
void cancel() {
  specrt_generator* generator = open_one();
  specrt_session* session = nullptr;
  expect(specrt_session_create(generator, &session));
  specrt_params* params = params_of(1500, 0.0);
  expect(specrt_params_set_integer(params, "ignore_eos", 1));
  struct Seen {
    specrt_session* session;
    std::thread other;
  } seen{session, {}};
  const auto callback = [](void* user, const specrt_chunk*) -> int32_t {
    Seen& own = *static_cast<Seen*>(user);
    if (!own.other.joinable()) {
      own.other = std::thread([&own] { expect(specrt_session_cancel(own.session)); });
    }
    return 0;
  };
  expect(specrt_generate(session, kPrompt, std::strlen(kPrompt), params, callback, &seen),
         SPECRT_CANCELLED);
  seen.other.join();
  print_json(session);
  expect(specrt_params_set_integer(params, "max_tokens", 4));
  expect(specrt_generate(session, kPrompt, std::strlen(kPrompt), params, nullptr, nullptr));
  print_json(session);
  expect(specrt_shutdown());
}

struct Allowed {
  int64_t token;
  int calls;
};

int32_t allow(void* user, const int64_t*, size_t count, float* scores, size_t vocabulary) {
  Allowed& own = *static_cast<Allowed*>(user);
  ++own.calls;
  if (count == 0) return 1;
  for (size_t at = 0; at < vocabulary; ++at) scores[at] = static_cast<int64_t>(at) == own.token;
  return 0;
}

int32_t refuse(void*, const int64_t*, size_t, float*, size_t) { return 3; }

int32_t fail(void*, const int64_t*, size_t, float*, size_t) {
  throw std::runtime_error("no scores today");
}

// One processor that decides, one that stops, one that throws.
void processors() {
  specrt_generator* generator = open_one();
  specrt_session* session = nullptr;
  expect(specrt_session_create(generator, &session));
  Allowed allowed{65, 0};
  const specrt_processor functions[] = {allow, refuse, fail};
  for (const specrt_processor function : functions) {
    specrt_params* params = params_of(6, 0.0);
    expect(specrt_params_add_processor(params, function, &allowed));
    const specrt_status status =
        specrt_generate(session, kPrompt, std::strlen(kPrompt), params, nullptr, nullptr);
    std::printf("%s|%s\n", specrt_status_name(status),
                status == SPECRT_OK ? "" : specrt_last_error());
    if (status == SPECRT_OK) print_json(session);
    expect(specrt_params_close(params));
  }
  if (allowed.calls == 0) std::exit(1);
  expect(specrt_shutdown());
}

// A child of a process that has opened a bundle is told so.
void forked() {
  specrt_generator* generator = open_one();
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    specrt_session* session = nullptr;
    specrt_status status = specrt_session_create(generator, &session);
    if (status == SPECRT_OK) {
      status = specrt_begin(session, kPrompt, std::strlen(kPrompt), nullptr);
    }
    std::printf("%s|%s\n", specrt_status_name(status), specrt_last_error());
    std::fflush(stdout);
    _exit(status == SPECRT_OK);
  }
  int status = 0;
  waitpid(child, &status, 0);
  std::printf("%d\n", status);
  stream(generator);
  expect(specrt_shutdown());
}

void opening() {
  specrt_generator* generator = nullptr;
  specrt_open_options options{};
  options.size = sizeof options;
  options.python = python;
  const specrt_status status = specrt_open(bundle, &options, &generator);
  std::printf("%s|%s\n", specrt_status_name(status), status ? specrt_last_error() : "");
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) return 2;
  bundle = arguments[1];
  python = count > 3 ? arguments[3] : nullptr;
  const std::string name = arguments[2];
  if (name == "twice") twice();
  if (name == "leave") leave();
  if (name == "cancel") cancel();
  if (name == "processors") processors();
  if (name == "forked") forked();
  if (name == "opening") opening();
  if (name == "closing_processor") closing_processor();
  if (name == "returning") returning();
  if (name == "threads") threads();
  if (name == "memory") memory();
  return 0;
}
