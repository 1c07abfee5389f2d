// Several threads: on one session, cancelling, closing, opening, and at the end.
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "abi/check.hpp"

namespace {

// A generation on a thread of its own, whose pass is blocked.
class Blocked {
 public:
  explicit Blocked(const specrt::Session& session, int passes = 1)
      : thread_([this, &session] { status_ = check::generate(session, "block"); }) {
    while (specrt::fake::alive().blocked < passes) std::this_thread::yield();
  }
  Blocked(const Blocked&) = delete;
  Blocked& operator=(const Blocked&) = delete;
  specrt_status join() {
    thread_.join();
    return status_;
  }

 private:
  specrt_status status_ = -1;
  std::thread thread_;
};

template <typename Body>
void together(int count, Body body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

CHECK_CASE(two_on_one_session) {
  check::Opened opened;
  specrt::Session& session = opened.session;
  Blocked first(session);
  const specrt_chunk* chunk = nullptr;
  REFUSES(SPECRT_BUSY, check::generate(session, "count 1"), "another call runs on this session");
  GIVES(SPECRT_BUSY, specrt_next(session.get(), 1, &chunk));
  GIVES(SPECRT_OK, check::generate(opened.generator.session(), "count 2"));
  session.cancel();
  GIVES(SPECRT_CANCELLED, first.join());
  THAT(session.stats().finish_reason == "cancelled");
  GIVES(SPECRT_OK, check::generate(session, "count 1"));
}

CHECK_CASE(close_while_running) {
  check::Opened opened;
  Blocked one(opened.session);
  opened.session.close();
  GIVES(SPECRT_CLOSED, one.join());
  const specrt::Session sessions[] = {opened.generator.session(), opened.generator.session(),
                                      opened.generator.session()};
  Blocked first(sessions[0]);
  Blocked second(sessions[1], 2);
  const specrt_chunk* chunk = nullptr;
  std::uint64_t begun = 0;
  GIVES(SPECRT_OK, check::begin(sessions[2], "forever", &begun));
  GIVES(SPECRT_OK, specrt_next(sessions[2].get(), begun, &chunk));
  opened.generator.close();
  GIVES(SPECRT_CLOSED, first.join());
  GIVES(SPECRT_CLOSED, second.join());
  GIVES(SPECRT_CLOSED, specrt_next(sessions[2].get(), begun, &chunk));
  THAT(specrt::fake::alive().hosts == 0);
}

// Nobody is told that what runs has ended before it has: processors run until a shutdown is over.
CHECK_CASE(ends_while_shutting_down) {
  check::Opened opened;
  specrt::Session other = opened.generator.session();
  std::uint64_t begun = 0;
  GIVES(SPECRT_OK, check::begin(other, "forever", &begun));
  std::atomic<bool> inside{false}, go{false}, ended{false};
  std::thread holds([&] {
    check::generate(opened.session, "forever", [&](const specrt_chunk&) {
      inside = true;
      while (!go) std::this_thread::yield();
      return 0;
    });
  });
  while (!inside) std::this_thread::yield();
  std::thread shuts([] { GIVES(SPECRT_OK, specrt_shutdown()); });
  while (check::status_of([&] { opened.generator.info(); }) == SPECRT_OK) std::this_thread::yield();
  std::thread ends([&] {
    GIVES(SPECRT_CLOSED, specrt_session_end(other.get(), begun));
    ended = true;
  });
  for (int i = 0; i < 100; ++i) std::this_thread::yield();
  THAT(!ended);
  go = true;
  for (std::thread* thread : {&holds, &shuts, &ends}) thread->join();
}

CHECK_CASE(storm_of_handles) {
  std::atomic<int> odd{0};
  together(4, [&](int thread) {
    for (int i = 0; i < 50; ++i) {
      const specrt::Generator generator("any");
      std::thread closer([&] { specrt_generator_close(generator.get()); });
      const specrt_status ran = check::status_of(
          [&] { generator.session().generate(thread == 0 ? "block" : "forever"); });
      closer.join();
      if (ran != SPECRT_CLOSED) ++odd;
    }
  });
  THAT(odd == 0);
}

CHECK_CASE(shutdown_with_calls) {
  check::Opened opened;
  const specrt::Session idle = opened.generator.session();
  const specrt::Params params;
  Blocked running(opened.session);
  std::thread second([] { GIVES(SPECRT_OK, specrt_shutdown()); });
  GIVES(SPECRT_OK, specrt_shutdown());
  second.join();
  GIVES(SPECRT_CLOSED, running.join());
  THAT(specrt::fake::alive().shutdowns == 1 && specrt::fake::alive().hosts == 0);
  specrt_generator* generator = nullptr;
  REFUSES(SPECRT_CLOSED, specrt_open("any", nullptr, &generator), "specrt was shut down");
  GIVES(SPECRT_CLOSED, check::generate(idle, "count 1"));
  GIVES(SPECRT_CLOSED, specrt_params_close(params.get()));
  GIVES(SPECRT_OK, specrt_shutdown());
  THAT(specrt_version() != nullptr);
}

CHECK_CASE(shutdown_in_a_storm) {
  std::atomic<int> odd{0}, begun{0};
  together(4, [&](int thread) {
    if (thread == 0) {
      while (begun < 3) std::this_thread::yield();
      GIVES(SPECRT_OK, specrt_shutdown());
      return;
    }
    ++begun;
    specrt_status status = SPECRT_OK;
    while (status == SPECRT_OK)
      status = check::status_of([] { specrt::Generator("any").session().generate("count 3"); });
    if (status != SPECRT_CLOSED) ++odd;
  });
  THAT(odd == 0 && specrt::fake::alive().shutdowns == 1);
}
