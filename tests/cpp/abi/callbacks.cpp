// Callbacks and processors that throw, stop, and call the library again.
#include <stdexcept>

#include "abi/check.hpp"
#include "fake/fake.hpp"

namespace {

struct Story {
  specrt_generator* generator = nullptr;
  specrt_session* session = nullptr;
  int chunks = 0;
  int stop_at = 0;
};

int32_t counting(void* user, const specrt_chunk* chunk) {
  auto& story = *static_cast<Story*>(user);
  THAT(chunk->count == 1 && chunk->text[chunk->bytes] == '\0');
  return ++story.chunks == story.stop_at ? 5 : 0;
}

int32_t throwing(void*, const specrt_chunk*) { throw std::runtime_error("no room left"); }
int32_t throwing_oddly(void*, const specrt_chunk*) { throw 1; }

int32_t re_entering(void* user, const specrt_chunk*) {
  auto& story = *static_cast<Story*>(user);
  const specrt_chunk* chunk = nullptr;
  specrt_stats stats{};
  stats.size = sizeof stats;
  GIVES(SPECRT_BUSY, check::generate(story.session, "count 1"));
  GIVES(SPECRT_BUSY, check::begin(story.session, "count 1"));
  GIVES(SPECRT_BUSY, specrt_next(story.session, &chunk));
  GIVES(SPECRT_BUSY, specrt_session_stats(story.session, &stats));
  GIVES(SPECRT_BUSY, specrt_shutdown());
  SAYS("inside a callback");
  specrt_session* other = nullptr;
  GIVES(SPECRT_OK, specrt_session_create(story.generator, &other));
  GIVES(SPECRT_OK, check::generate(other, "count 3"));
  GIVES(SPECRT_OK, specrt_session_close(other));
  ++story.chunks;
  return 0;
}

int32_t closing_session(void* user, const specrt_chunk*) {
  auto& story = *static_cast<Story*>(user);
  ++story.chunks;
  GIVES(SPECRT_OK, specrt_session_close(story.session));
  GIVES(SPECRT_CLOSED, specrt_session_close(story.session));
  return 0;
}

int32_t closing_generator(void* user, const specrt_chunk*) {
  auto& story = *static_cast<Story*>(user);
  ++story.chunks;
  GIVES(SPECRT_OK, specrt_generator_close(story.generator));
  GIVES(SPECRT_CLOSED, check::generate(story.session, "count 1"));
  return 0;
}

int32_t cancelling(void* user, const specrt_chunk*) {
  auto& story = *static_cast<Story*>(user);
  ++story.chunks;
  GIVES(SPECRT_OK, specrt_session_cancel(story.session));
  return 0;
}

int32_t raising(void* user, const std::int64_t* ids, std::size_t count, float* scores,
                std::size_t vocabulary) {
  THAT(count == 3 && ids[2] == 3 && vocabulary == 8);
  scores[7] += 1.0f;
  ++*static_cast<int*>(user);
  return 0;
}
int32_t refusing(void*, const std::int64_t*, std::size_t, float*, std::size_t) { return -3; }
int32_t failing(void*, const std::int64_t*, std::size_t, float*, std::size_t) {
  throw std::logic_error("scores are odd");
}
int32_t shutting(void*, const std::int64_t*, std::size_t, float*, std::size_t) {
  GIVES(SPECRT_BUSY, specrt_shutdown());
  return 0;
}

specrt_status processed(specrt_processor processor, void* user) {
  check::Opened opened;
  specrt_params* params = nullptr;
  GIVES(SPECRT_OK, specrt_params_create(&params));
  GIVES(SPECRT_OK, specrt_params_add_processor(params, processor, user));
  specrt_session* session = opened.session();
  const specrt_status status = check::generate(session, "process", nullptr, nullptr, params);
  GIVES(SPECRT_OK, specrt_params_close(params));
  return status;
}

}  // namespace

CHECK_CASE(callback_stops) {
  check::Opened opened;
  Story story{opened.generator, opened.session(), 0, 3};
  GIVES(SPECRT_CANCELLED, check::generate(story.session, "forever", counting, &story));
  THAT(story.chunks == 3);
  THAT(check::finish_reason(story.session) == "cancelled");
  Story all{opened.generator, story.session, 0, 0};
  GIVES(SPECRT_OK, check::generate(all.session, "count 4", counting, &all));
  THAT(all.chunks == 4);
}

CHECK_CASE(callback_throws) {
  check::Opened opened;
  specrt_session* session = opened.session();
  GIVES(SPECRT_CALLBACK, check::generate(session, "forever", throwing));
  SAYS("the callback threw: no room left");
  THAT(check::finish_reason(session) == "error");
  GIVES(SPECRT_CALLBACK, check::generate(session, "forever", throwing_oddly));
  GIVES(SPECRT_OK, check::generate(session, "count 1"));
}

CHECK_CASE(callback_re_enters) {
  check::Opened opened;
  Story story{opened.generator, opened.session()};
  GIVES(SPECRT_OK, check::generate(story.session, "count 2", re_entering, &story));
  THAT(story.chunks == 2);
}

CHECK_CASE(callback_closes) {
  check::Opened opened;
  Story session{opened.generator, opened.session()};
  GIVES(SPECRT_CLOSED, check::generate(session.session, "forever", closing_session, &session));
  Story generator{opened.generator, opened.session()};
  GIVES(SPECRT_CLOSED,
        check::generate(generator.session, "forever", closing_generator, &generator));
  THAT(session.chunks == 1 && generator.chunks == 1);
  THAT(specrt::fake::alive().hosts == 0);
}

CHECK_CASE(callback_cancels) {
  check::Opened opened;
  Story story{opened.generator, opened.session()};
  GIVES(SPECRT_CANCELLED, check::generate(story.session, "forever", cancelling, &story));
  THAT(story.chunks == 1);
}

CHECK_CASE(processors) {
  int calls = 0;
  GIVES(SPECRT_OK, processed(raising, &calls));
  THAT(calls == 1);
  GIVES(SPECRT_CALLBACK, processed(refusing, nullptr));
  SAYS("a logits processor returned -3; expected 0");
  GIVES(SPECRT_CALLBACK, processed(failing, nullptr));
  SAYS("a logits processor threw: scores are odd");
  GIVES(SPECRT_OK, processed(shutting, nullptr));
}
