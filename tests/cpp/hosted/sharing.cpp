// Sessions that run each other's passes, threads that come and go, and memory over time.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "common.hpp"

namespace hosted {

namespace {

struct Own {
  specrt_session* session = nullptr;
  std::atomic<int> calls{0};
  std::atomic<bool> inside{false};
  std::atomic<bool> go{false};
};

int32_t closes(void* user, const int64_t*, size_t, float*, size_t) {
  Own& own = *static_cast<Own*>(user);
  if (++own.calls == 1) return 0;  // on its own thread
  if (own.calls == 2) expect(specrt_session_close(own.session));
  return 3;
}

// Goes on until it is told.
int32_t waits(void* user, const int64_t*, size_t, float*, size_t) {
  Own& own = *static_cast<Own*>(user);
  if (++own.calls == 1) return 0;  // on its own thread
  own.inside = true;
  while (!own.go) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  own.inside = false;
  return 0;
}

specrt_session* made(specrt_generator* generator) {
  specrt_session* session = nullptr;
  expect(specrt_session_create(generator, &session));
  return session;
}

// A session with a generation that has a row, and whose passes the next who generates runs too.
void begin_own(specrt_generator* generator, Own& own, specrt_processor processor) {
  own.session = made(generator);
  specrt_params* params = params_of(40, 0.0);
  expect(specrt_params_set_integer(params, "gamma", 0));
  expect(specrt_params_add_processor(params, processor, &own));
  begin(own.session, params);
  expect(specrt_params_close(params));
  const specrt_chunk* chunk = nullptr;
  expect(specrt_next(own.session, &chunk));
}

void complete(specrt_session* session, int64_t tokens) {
  specrt_params* params = params_of(tokens, 0.0);
  expect(specrt_generate(session, kPrompt, std::strlen(kPrompt), params, nullptr, nullptr));
  expect(specrt_params_close(params));
}

long resident_kib() {
  long total = 0, resident = 0;
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr || std::fscanf(file, "%ld %ld", &total, &resident) != 2) std::exit(1);
  std::fclose(file);
  return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

}  // namespace

// A processor is called in the turn of another session, closes its own there, and stops.
void closing_processor() {
  specrt_generator* generator = open_one();
  Own own;
  begin_own(generator, own, closes);
  complete(made(generator), 40);
  std::printf("%d\n", own.calls.load());
  expect(specrt_shutdown());
}

// When a generation has ended, none of its processors is called any more, nor running.
void returning() {
  specrt_generator* generator = open_one();
  Own own;
  begin_own(generator, own, waits);
  std::thread other([generator] { complete(made(generator), 40); });
  while (!own.inside) std::this_thread::yield();
  std::thread told([&own] { own.go = true; });
  expect(specrt_session_cancel(own.session));
  const specrt_chunk* chunk = nullptr;
  expect(specrt_next(own.session, &chunk), SPECRT_CANCELLED);
  std::printf("%d\n", own.inside.load());
  told.join();
  other.join();
  expect(specrt_shutdown());
}

// Threads come, use a session, and end; what Python knew of them ends too.
void threads() {
  specrt_generator* generator = open_one();
  specrt_session* session = made(generator);
  const auto decode = [generator] {
    const int64_t id = 5;
    size_t bytes = 0;
    expect(specrt_decode(generator, &id, 1, nullptr, 0, &bytes));
  };
  const auto many = [&](int count) {
    for (int i = 0; i < count; ++i) std::thread(decode).join();
  };
  many(100);
  const long before = resident_kib();
  many(3000);
  std::printf("%ld\n", resident_kib() - before);
  std::thread([&] { complete(session, 2); }).join();
  expect(specrt_shutdown());
}

// Growth over 200 generations, and over 50 times opening and closing, in KiB.
void memory() {
  specrt_generator* generator = open_one();
  const auto generations = [&](int count) {
    for (int i = 0; i < count; ++i) {
      specrt_session* session = made(generator);
      complete(session, 4);
      expect(specrt_session_close(session));
    }
  };
  generations(20);
  const long before = resident_kib();
  generations(200);
  const long after = resident_kib();
  expect(specrt_generator_close(generator));
  const auto cycles = [&](int count) {
    for (int i = 0; i < count; ++i) {
      generator = open_one();
      complete(made(generator), 4);
      expect(specrt_generator_close(generator));
    }
  };
  cycles(5);
  const long opened = resident_kib();
  cycles(50);
  std::printf("%ld %ld\n", after - before, resident_kib() - opened);
  expect(specrt_shutdown());
}

}  // namespace hosted
