// application CASE [NAME=VALUE ...]: runs a case, which prints what came of it.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <clocale>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "application/application.hpp"

namespace application {

std::map<std::string, std::string> given;

void require(specrt_status status, specrt_status expected) {
  if (status == expected) return;
  throw std::runtime_error(specrt_status_name(status) + (": " + std::string(specrt_last_error())) +
                           ", expected " + specrt_status_name(expected));
}

specrt_status try_open(specrt_generator** generator, bool prompt_cache) {
  const auto path = [](const char* name) {
    return given.count(name) == 0 ? nullptr : given[name].c_str();
  };
  specrt_open_options options{};
  options.size = sizeof options;
  options.threads = 1;
  options.no_prompt_cache = prompt_cache ? 0 : 1;
  options.python = path("python");
  options.onnxruntime = path("onnxruntime");
  options.tokenizer = path("tokenizer");
  return specrt_open(given["bundle"].c_str(), &options, generator);
}

specrt_generator* open(bool prompt_cache) {
  specrt_generator* generator = nullptr;
  require(try_open(&generator, prompt_cache));
  return generator;
}

specrt_session* create(specrt_generator* generator) {
  specrt_session* session = nullptr;
  require(specrt_session_create(generator, &session));
  return session;
}

specrt_stats stats_of(specrt_session* session) {
  specrt_stats stats{};
  stats.size = sizeof stats;
  require(specrt_session_stats(session, &stats));
  return stats;
}

Ids ids_of(specrt_session* session) {
  const int64_t* ids = nullptr;
  std::size_t count = 0;
  require(specrt_session_ids(session, &ids, &count));
  return {ids, ids + count};
}

std::string json_of(specrt_session* session) {
  const char* json = nullptr;
  std::size_t bytes = 0;
  require(specrt_session_json(session, &json, &bytes));
  return {json, bytes};
}

std::string listed(const Ids& ids) {
  std::string text;
  for (const int64_t id : ids) text += (text.empty() ? "" : ", ") + std::to_string(id);
  return "[" + text + "]";
}

namespace {

constexpr char kPrompt[] = "def area(radius):\n";
constexpr int64_t kForever = int64_t{1} << 40;  // the context ends before

specrt_params* params_of(int64_t tokens, specrt_processor processor = nullptr,
                         void* user = nullptr) {
  specrt_params* params = nullptr;
  require(specrt_params_create(&params));
  require(specrt_params_set_integer(params, "max_tokens", tokens));
  require(specrt_params_set_integer(params, "ignore_eos", 1));
  if (processor != nullptr) require(specrt_params_add_processor(params, processor, user));
  return params;
}

// Generate from token ids, which every implementation takes; closes the parameters.
specrt_status complete(specrt_session* session, specrt_params* params,
                       specrt_callback callback = nullptr, void* user = nullptr) {
  const Ids prompt(20, 57);
  const specrt_status status =
      specrt_generate_ids(session, prompt.data(), prompt.size(), params, callback, user);
  require(specrt_params_close(params));
  return status;
}

void begin(specrt_session* session, specrt_params* params) {
  const Ids prompt(20, 57);
  require(specrt_begin_ids(session, prompt.data(), prompt.size(), params));
  require(specrt_params_close(params));
  const specrt_chunk* chunk = nullptr;
  require(specrt_next(session, &chunk));
}

void print(specrt_status status) {
  std::printf("%s|%s\n", specrt_status_name(status), status ? specrt_last_error() : "");
}

// Sessions on threads of their own, which both need the costs of passes before either knows them.
void together() {
  specrt_generator* const generator = open();
  std::vector<std::thread> threads;
  Ids texts[2];
  for (Ids& ids : texts) {
    threads.emplace_back([&ids, generator] {
      specrt_session* const session = create(generator);
      for (const std::string drafter : {"model", "cascade", "ngram"}) {
        specrt_params* const params = params_of(30);
        require(specrt_params_set_text(params, "gamma", "auto", 4));
        require(specrt_params_set_text(params, "drafter", drafter.data(), drafter.size()));
        require(complete(session, params));
        ids = ids_of(session);
      }
      require(specrt_session_close(session));
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("[%s, %s]\n", listed(texts[0]).c_str(), listed(texts[1]).c_str());
  require(specrt_shutdown());
}

// What runs ends where its session is cancelled, or its bundle closed, by another thread.
void ended() {
  specrt_generator* const generator = open();
  specrt_session* const session = create(generator);
  for (const bool closes : {false, true}) {
    std::atomic<bool> running{false};
    const auto note = [](void* user, const specrt_chunk*) -> int32_t {
      *static_cast<std::atomic<bool>*>(user) = true;
      return 0;
    };
    std::thread reader([&] { print(complete(session, params_of(kForever), note, &running)); });
    while (!running) std::this_thread::yield();
    require(closes ? specrt_generator_close(generator) : specrt_session_cancel(session));
    reader.join();
    if (closes) break;
    std::printf("%s\n", stats_of(session).finish_reason);
    require(complete(session, params_of(4)));
    std::printf("%s\n", listed(ids_of(session)).c_str());
  }
}

// Leave while a bundle is open and a text half read.
void leave() {
  begin(create(open()), params_of(24));
  std::printf("left\n");
}

// One processor that decides, one that stops, one that throws.
void processors() {
  const specrt_processor decides = [](void*, const int64_t*, std::size_t, float* scores,
                                      std::size_t vocabulary) -> int32_t {
    for (std::size_t at = 0; at < vocabulary; ++at) scores[at] = at == 65;
    return 0;
  };
  const specrt_processor stops = [](void*, const int64_t*, std::size_t, float*,
                                    std::size_t) -> int32_t { return 3; };
  const specrt_processor throws = [](void*, const int64_t*, std::size_t, float*,
                                     std::size_t) -> int32_t {
    throw std::runtime_error("no scores today");
  };
  specrt_session* const session = create(open());
  for (const specrt_processor each : {decides, stops, throws}) {
    print(complete(session, params_of(6, each)));
    if (each == decides) std::printf("%s\n", listed(ids_of(session)).c_str());
  }
  require(specrt_shutdown());
}

// A generation whose passes another session runs too.
struct Shared {
  specrt_session* session = nullptr;
  std::atomic<int> calls{0};
  std::atomic<bool> inside{false}, go{false};
};

void begin_shared(specrt_generator* generator, Shared& shared, specrt_processor processor) {
  shared.session = create(generator);
  specrt_params* const params = params_of(40, processor, &shared);
  require(specrt_params_set_integer(params, "gamma", 0));
  begin(shared.session, params);
}

// A processor is called in the turn of another session, closes its own there, and stops.
void closing_processor() {
  const auto closes = [](void* user, const int64_t*, std::size_t, float*, std::size_t) -> int32_t {
    Shared& shared = *static_cast<Shared*>(user);
    if (++shared.calls == 1) return 0;  // on its own thread
    if (shared.calls == 2) require(specrt_session_close(shared.session));
    return 3;
  };
  specrt_generator* const generator = open();
  Shared shared;
  begin_shared(generator, shared, closes);
  require(complete(create(generator), params_of(40)));
  std::printf("%d\n", shared.calls.load());
  require(specrt_shutdown());
}

// When a generation has ended, none of its processors is called any more, nor running.
void returning() {
  const auto waits = [](void* user, const int64_t*, std::size_t, float*, std::size_t) -> int32_t {
    Shared& shared = *static_cast<Shared*>(user);
    if (++shared.calls == 1) return 0;  // on its own thread
    shared.inside = true;
    while (!shared.go) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    shared.inside = false;
    return 0;
  };
  specrt_generator* const generator = open();
  Shared shared;
  begin_shared(generator, shared, waits);
  std::thread other([generator] { require(complete(create(generator), params_of(40))); });
  while (!shared.inside) std::this_thread::yield();
  std::thread signal([&shared] { shared.go = true; });
  require(specrt_session_cancel(shared.session));
  const specrt_chunk* chunk = nullptr;
  require(specrt_next(shared.session, &chunk), SPECRT_CANCELLED);
  std::printf("%d\n", shared.inside.load());
  signal.join();
  other.join();
  require(specrt_shutdown());
}

// A child of a process that has opened a bundle is refused; its parent goes on.
void forked() {
  specrt_generator* const generator = open();
  std::fflush(stdout);
  if (const pid_t child = fork(); child == 0) {
    specrt_session* session = nullptr;
    specrt_status status = specrt_session_create(generator, &session);
    if (status == SPECRT_OK) status = specrt_begin(session, kPrompt, sizeof kPrompt - 1, nullptr);
    print(status);
    std::fflush(stdout);
    _exit(0);
  } else {
    waitpid(child, nullptr, 0);
  }
  specrt_session* const session = create(generator);
  require(complete(session, params_of(4)));
  std::printf("%s\n", listed(ids_of(session)).c_str());
  require(specrt_shutdown());
}

void opening() {
  specrt_generator* generator = nullptr;
  print(try_open(&generator));
}

// JSON has points where the application has commas.
void locale() {
  const bool set = std::setlocale(LC_ALL, "") != nullptr;
  std::printf("%s\n", set ? std::localeconv()->decimal_point : "none");
  specrt_session* const session = create(open());
  specrt_params* const params = params_of(3);
  require(specrt_params_set_integer(params, "logprobs", 1));
  require(complete(session, params));
  std::printf("%s\n", json_of(session).c_str());
  require(specrt_shutdown());
}

long resident_kib() {
  long total = 0, resident = 0;
  std::FILE* const file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr || std::fscanf(file, "%ld %ld", &total, &resident) != 2)
    throw std::runtime_error("/proc/self/statm cannot be read");
  std::fclose(file);
  return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

// Growth in KiB while a body is repeated, once it was warm.
template <typename Body>
void print_growth(int warm, int count, Body body) {
  for (int i = 0; i < warm; ++i) body();
  const long before = resident_kib();
  for (int i = 0; i < count; ++i) body();
  std::printf("%ld\n", resident_kib() - before);
}

// Over generations; over threads that come, call and end; over opening and closing; and what is
// given back when the bundle is closed.
void memory() {
  specrt_generator* generator = open();
  print_growth(20, 200, [&] {
    specrt_session* const session = create(generator);
    require(complete(session, params_of(4)));
    require(specrt_session_close(session));
  });
  const auto decode = [&] {
    const int64_t id = 5;
    std::size_t bytes = 0;
    require(specrt_decode(generator, &id, 1, nullptr, 0, &bytes));
  };
  print_growth(100, 3000, [&] { std::thread(decode).join(); });
  const long open_kib = resident_kib();
  require(specrt_generator_close(generator));
  print_growth(5, 50, [&] {
    generator = open();
    require(complete(create(generator), params_of(8)));
    require(specrt_generator_close(generator));
  });
  std::printf("%ld %ld\n", open_kib, resident_kib());
  require(specrt_shutdown());
}

const std::map<std::string, void (*)()> kCases = {
    {"replay", replay},       {"together", together},     {"ended", ended},
    {"leave", leave},         {"processors", processors}, {"closing_processor", closing_processor},
    {"returning", returning}, {"forked", forked},         {"opening", opening},
    {"locale", locale},       {"memory", memory}};

}  // namespace

}  // namespace application

int main(int count, char** arguments) {
  for (int i = 2; i < count; ++i) {
    const std::string argument = arguments[i];
    const std::size_t end = argument.find('=');
    application::given[argument.substr(0, end)] = argument.substr(end + 1);
  }
  try {
    application::kCases.at(count > 1 ? arguments[1] : "")();
    return 0;
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 2;
  }
}
