// Several threads: on one session, cancelling, closing, opening, and at the end.
#include <atomic>
#include <thread>
#include <vector>

#include "abi/check.hpp"

namespace {

// A generation on a thread of its own, whose pass is blocked.
class Blocked {
 public:
  explicit Blocked(specrt_session* session, int passes = 1)
      : thread_([this, session] { status_ = check::generate(session, "block"); }) {
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
  specrt_session* session = opened.session();
  Blocked first(session);
  const specrt_chunk* chunk = nullptr;
  REFUSES(SPECRT_BUSY, check::generate(session, "count 1"), "another call runs on this session");
  GIVES(SPECRT_BUSY, specrt_next(session, &chunk));
  GIVES(SPECRT_OK, check::generate(opened.session(), "count 2"));
  GIVES(SPECRT_OK, specrt_session_cancel(session));
  GIVES(SPECRT_CANCELLED, first.join());
  THAT(check::finish_reason(session) == "cancelled");
  GIVES(SPECRT_OK, check::generate(session, "count 1"));
}

CHECK_CASE(close_while_running) {
  check::Opened opened;
  specrt_session* session = opened.session();
  Blocked one(session);
  GIVES(SPECRT_OK, specrt_session_close(session));
  GIVES(SPECRT_CLOSED, one.join());
  Blocked first(opened.session());
  Blocked second(opened.session(), 2);
  specrt_session* begun = opened.session();
  const specrt_chunk* chunk = nullptr;
  GIVES(SPECRT_OK, check::begin(begun, "forever"));
  GIVES(SPECRT_OK, specrt_next(begun, &chunk));
  GIVES(SPECRT_OK, specrt_generator_close(opened.generator));
  GIVES(SPECRT_CLOSED, first.join());
  GIVES(SPECRT_CLOSED, second.join());
  GIVES(SPECRT_CLOSED, specrt_next(begun, &chunk));
  THAT(specrt::fake::alive().hosts == 0);
}

CHECK_CASE(storm_on_one_session) {
  check::Opened opened;
  specrt_session* session = opened.session();
  std::atomic<int> odd{0};
  together(4, [&](int thread) {
    for (int i = 0; i < 200; ++i) {
      if (thread == 3) {
        specrt_session_cancel(session);
        std::this_thread::yield();
        continue;
      }
      const specrt_status status = check::generate(session, thread == 0 ? "count 3" : "count 50");
      if (status != SPECRT_OK && status != SPECRT_BUSY && status != SPECRT_CANCELLED) ++odd;
    }
  });
  THAT(odd == 0);
}

CHECK_CASE(storm_of_handles) {
  std::atomic<int> odd{0};
  together(4, [&](int thread) {
    for (int i = 0; i < 50; ++i) {
      specrt_generator* generator = nullptr;
      if (specrt_open("any", nullptr, &generator) != SPECRT_OK) ++odd;
      specrt_session* session = nullptr;
      std::thread closer([&] { specrt_generator_close(generator); });
      const specrt_status made = specrt_session_create(generator, &session);
      const specrt_status ran = made == SPECRT_OK
                                    ? check::generate(session, thread == 0 ? "block" : "forever")
                                    : SPECRT_CLOSED;
      closer.join();
      if (ran != SPECRT_CLOSED) ++odd;
    }
  });
  THAT(odd == 0);
}

CHECK_CASE(storm_of_closing) {
  check::Opened opened;
  std::atomic<int> closed{0}, odd{0};
  for (int i = 0; i < 50; ++i) {
    specrt_session* session = opened.session();
    together(3, [&](int thread) {
      if (thread == 0) {
        const specrt_status ran = check::generate(session, "forever");
        if (ran != SPECRT_CLOSED) ++odd;
        return;
      }
      if (specrt_session_close(session) == SPECRT_OK) ++closed;
    });
  }
  THAT(odd == 0);
  THAT(closed == 50);
}

CHECK_CASE(params_while_used) {
  check::Opened opened;
  specrt_params* params = check::params();
  specrt_session* session = opened.session();
  together(2, [&](int thread) {
    for (int i = 0; i < 100; ++i) {
      if (thread == 0) {
        specrt_params_add_text(params, "stop", "abc", 3);
      } else {
        check::generate(session, "count 1", nullptr, params);
      }
    }
  });
  GIVES(SPECRT_OK, specrt_params_close(params));
}

CHECK_CASE(shutdown_with_calls) {
  check::Opened opened;
  specrt_session* idle = opened.session();
  specrt_params* params = check::params();
  Blocked running(opened.session());
  std::thread second([] { GIVES(SPECRT_OK, specrt_shutdown()); });
  GIVES(SPECRT_OK, specrt_shutdown());
  second.join();
  GIVES(SPECRT_CLOSED, running.join());
  THAT(specrt::fake::alive().shutdowns == 1);
  THAT(specrt::fake::alive().hosts == 0);
  specrt_generator* generator = nullptr;
  REFUSES(SPECRT_CLOSED, specrt_open("any", nullptr, &generator), "specrt was shut down");
  GIVES(SPECRT_CLOSED, check::generate(idle, "count 1"));
  GIVES(SPECRT_CLOSED, specrt_params_close(params));
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
    for (;;) {
      specrt_generator* generator = nullptr;
      specrt_session* session = nullptr;
      specrt_status status = specrt_open("any", nullptr, &generator);
      if (status == SPECRT_OK) status = specrt_session_create(generator, &session);
      if (status == SPECRT_OK) status = check::generate(session, "count 3");
      if (status == SPECRT_CLOSED) break;
      if (status != SPECRT_OK) ++odd;
    }
  });
  THAT(odd == 0);
  THAT(specrt::fake::alive().shutdowns == 1);
}
