// Every function with handles and pointers that will not do, what generations come to, structures
// of other versions, and callbacks that throw, stop, and call the library again.
#include <cstdint>
#include <cstring>
#include <limits>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "abi/check.hpp"

namespace {

using check::begin;
using check::generate;

const auto reason = [](const specrt::Session& session) { return session.stats().finish_reason; };

// A function with a handle, and zeros for its other arguments.
struct Call {
  std::function<specrt_status(void*)> with;
  bool takes_zeros = false;
};

template <typename Handle, typename... Others>
Call call(specrt_status (*function)(Handle*, Others...), bool takes_zeros = false) {
  return {[function](void* handle) { return function(static_cast<Handle*>(handle), Others{}...); },
          takes_zeros};
}

specrt_status create_session(specrt_generator* generator) {
  specrt_session* session = nullptr;
  const specrt_status status = specrt_session_create(generator, &session);
  THAT((status == SPECRT_OK) == (session != nullptr));
  specrt_session_close(session);
  return status;
}

specrt_status copy_params(specrt_params* params) {
  specrt_params* copy = nullptr;
  const specrt_status status = specrt_params_copy(params, &copy);
  THAT((status == SPECRT_OK) == (copy != nullptr));
  specrt_params_close(copy);
  return status;
}

// The functions of each kind of handle; the last one closes it.
struct Kind {
  std::string name, origin;
  std::vector<Call> calls;
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      {"generator",
       "specrt_open",
       {call(create_session, true), call(specrt_generator_info), call(specrt_encode),
        call(specrt_decode), call(specrt_token_bytes), call(specrt_generator_memory),
        call(specrt_generator_close, true)}},
      {"session",
       "specrt_session_create",
       {call(specrt_generate), call(specrt_generate_ids), call(specrt_begin),
        call(specrt_begin_ids), call(specrt_next), call(specrt_session_cancel, true),
        call(specrt_session_end, true), call(specrt_session_stats), call(specrt_session_logprobs),
        call(specrt_session_prompt_logprobs), call(specrt_session_text), call(specrt_session_ids),
        call(specrt_session_json), call(specrt_session_close, true)}},
      {"params",
       "specrt_params_create",
       {call(copy_params, true), call(specrt_params_set_integer), call(specrt_params_set_number),
        call(specrt_params_set_text), call(specrt_params_add_text), call(specrt_params_add_tokens),
        call(specrt_params_add_bias, true), call(specrt_params_add_processor),
        call(specrt_params_clear, true), call(specrt_params_close, true)}}};
  return all;
}

// A structure in front of the space that a newer header would give it.
template <typename Struct>
struct Newer {
  Struct known;
  unsigned char more[64];
};

}  // namespace

CHECK_CASE(handles) {
  int local = 0;
  check::Opened one;
  specrt::Params params;
  void* const open[] = {one.generator.get(), one.session.get(), params.get()};
  for (std::size_t kind = 0; kind < 3; ++kind) {
    const auto& [name, origin, calls] = kinds()[kind];
    const std::string remedy = "; pass what " + origin + " gave";
    for (const Call& each : calls) {
      const bool closes = &each == &calls.back();
      const auto refused = [&](void* handle, const std::string& words) {
        REFUSES(SPECRT_INVALID_ARGUMENT, each.with(handle), (words + remedy).c_str());
      };
      if (!closes) refused(nullptr, name + " is NULL");
      if (closes) GIVES(SPECRT_OK, each.with(nullptr));
      for (std::size_t other = 0; other < 3; ++other)
        if (other != kind)
          refused(open[other], name + " is the handle of a " + kinds()[other].name);
      refused(&local, name + " is not a handle of this library");
      for (const std::uintptr_t odd : {std::uintptr_t{1}, std::uintptr_t{4}, UINTPTR_MAX})
        refused(reinterpret_cast<void*>(odd), "");
      if (!closes)
        GIVES(each.takes_zeros ? SPECRT_OK : SPECRT_INVALID_ARGUMENT, each.with(open[kind]));
    }
  }
  check::Opened two;
  specrt::Params used;
  const specrt::Session left = two.generator.session();
  void* const closed[] = {two.generator.get(), two.session.get(), used.get()};
  for (const std::size_t kind : {2, 1, 0}) {
    const auto& calls = kinds()[kind].calls;
    GIVES(SPECRT_OK, calls.back().with(closed[kind]));
    for (const Call& each : calls) REFUSES(SPECRT_CLOSED, each.with(closed[kind]), "was closed");
  }
  REFUSES(SPECRT_CLOSED, generate(left, "count 1"), "or its generator was");
  REFUSES(SPECRT_CLOSED, generate(one.session, "count 1", nullptr, &used), "params was closed");
  std::set<specrt_session*> seen;
  for (int i = 0; i < 100; ++i) THAT(seen.insert(one.generator.session().get()).second);
}

CHECK_CASE(pointers) {
  check::Opened opened;
  specrt::Params given;
  specrt_generator* none = nullptr;
  specrt_generator* const generator = opened.generator.get();
  specrt_session* const session = opened.session.get();
  specrt_params* const params = given.get();
  const specrt_chunk* chunk = nullptr;
  std::uint64_t generation = 0;
  const std::int64_t id = 1, outside = 100;
  std::size_t count = 9;
  specrt_stats stats{};
  stats.size = 3;
  const auto refused = [](specrt_status status, const char* words) {
    REFUSES(SPECRT_INVALID_ARGUMENT, status, words);
  };
  refused(specrt_open(nullptr, nullptr, &none), "bundle is NULL");
  refused(specrt_open("any", nullptr, nullptr), "generator is NULL");
  refused(specrt_session_create(generator, nullptr), "session is NULL");
  refused(specrt_params_create(nullptr), "params is NULL");
  refused(specrt_params_copy(params, nullptr), "copy is NULL");
  refused(specrt_begin(session, nullptr, 4, nullptr, &generation), "prompt is NULL");
  refused(specrt_begin(session, "a", 1, nullptr, nullptr), "generation is NULL");
  refused(specrt_begin(session, "a\0b", 3, nullptr, &generation), "prompt holds a zero byte at 1");
  refused(specrt_encode(generator, "a\0b", 3, nullptr, 0, &count), "text holds a zero byte at 1");
  refused(specrt_generate_ids(session, nullptr, 3, nullptr, nullptr, nullptr), "ids is NULL");
  refused(specrt_begin_ids(session, nullptr, 0, nullptr, &generation), "the prompt has no tokens");
  refused(specrt_generate_ids(session, &outside, 1, nullptr, nullptr, nullptr),
          "token id 100 is not in the vocabulary of 0 to 99");
  refused(specrt_session_stats(session, &stats), "");
  refused(specrt_next(session, 1, &chunk), "nothing was generated");
  refused(specrt_encode(generator, "a", 1, nullptr, 2, &count), "ids is NULL");
  refused(specrt_encode(generator, nullptr, 1, nullptr, 0, &count), "text is NULL");
  refused(specrt_decode(generator, nullptr, 2, nullptr, 0, &count), "ids is NULL");
  refused(specrt_params_set_text(params, "regex", nullptr, 1), "regex is NULL");
  refused(specrt_params_add_text(params, "stop", nullptr, 1), "stop is NULL");
  refused(specrt_params_add_tokens(params, "stop_token_ids", nullptr, 1), "ids is NULL");
  refused(specrt_params_add_tokens(params, "stop_token_ids", &id, SIZE_MAX), "the length of ids");
  refused(specrt_params_add_processor(params, nullptr, nullptr), "expected a function");
  refused(specrt_params_set_text(params, "r\xFFgex", "a", 1), "name is not UTF-8");
  for (const char* wrong :
       {"\xED\xA0\x80", "\xF4\x90\x80\x80", "\x80", "\xE2\x82", "\xE0\x80\x80", "a\xC0\xAF"})
    refused(specrt_params_add_text(params, "stop", wrong, std::strlen(wrong)), "is not UTF-8 at");
}

CHECK_CASE(opening) {
  specrt_generator* generator = nullptr;
  const auto open = [&](const char* bundle) { return specrt_open(bundle, nullptr, &generator); };
  REFUSES(SPECRT_BUNDLE, open("missing"), "no bundle is at missing");
  THAT(generator == nullptr);
  REFUSES(SPECRT_MEMORY, open("memory"), "not enough memory");
  GIVES(SPECRT_INTERNAL, open("bug"));
  GIVES(SPECRT_INVALID_ARGUMENT, open("b\xFFg"));
  REFUSES(SPECRT_INVALID_ARGUMENT, open(""), "bundle is ''; expected the path");
  Newer<specrt_open_options> options{};
  const auto opened = [&] { return specrt_open("any", &options.known, &generator); };
  for (const std::size_t size :
       {std::size_t{0}, sizeof(std::size_t), offsetof(specrt_open_options, tokenizer), SIZE_MAX}) {
    options.known.size = size;
    REFUSES(SPECRT_INVALID_ARGUMENT, opened(), "specrt_open_options->size is");
  }
  options.known.size = sizeof options.known;
  options.known.threads = -1;
  REFUSES(SPECRT_INVALID_ARGUMENT, opened(), "threads is -1; expected");
  options.known.threads = 77;  // a status of OK is not let through as a failure
  GIVES(SPECRT_INTERNAL, opened());
  options.known.threads = 0;
  options.known.size = sizeof options;
  options.more[63] = 1;
  REFUSES(SPECRT_UNSUPPORTED, opened(), "use a newer library");
  options.more[63] = 0;
  GIVES(SPECRT_OK, opened());
  Newer<specrt_info> info{};
  std::memset(info.more, 0x5A, sizeof info.more);
  info.known.size = offsetof(specrt_info, notices);
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_generator_info(generator, &info.known));
  THAT(info.known.name == nullptr);
  info.known.size = offsetof(specrt_info, bos_token);  // of the first version
  GIVES(SPECRT_OK, specrt_generator_info(generator, &info.known));
  THAT(info.known.name != nullptr && info.known.eos_tokens == nullptr);
  info.known.size = sizeof info;
  GIVES(SPECRT_OK, specrt_generator_info(generator, &info.known));
  THAT(info.known.size == sizeof info && std::strcmp(info.known.backend, "fake") == 0);
  THAT(info.known.vocabulary == 100 && info.known.has_tokenizer == 1 && info.known.rows == 2);
  THAT(info.more[0] == 0x5A && info.more[63] == 0x5A);
  GIVES(SPECRT_OK, specrt_generator_close(generator));
}

CHECK_CASE(logs) {
  static std::vector<std::string> lines;
  const auto note = [](void* user, std::int32_t level, const char* message) {
    lines.push_back(std::to_string(level) + message);
    GIVES(SPECRT_BUSY, specrt_shutdown());  // of which nothing is told
    throw std::runtime_error(static_cast<const char*>(user));
  };
  char user[] = "no log";
  GIVES(SPECRT_OK, specrt_set_log(note, user));
  {
    const specrt::Generator generator("noted");
    const specrt::Session session = generator.session();
    GIVES(SPECRT_ENGINE, generate(session, "fail"));
    GIVES(SPECRT_CANCELLED, generate(session, "forever", [](const specrt_chunk&) { return 1; }));
  }
  THAT((lines == std::vector<std::string>{"2one", "2two", "1the pass failed"}));
  GIVES(SPECRT_OK, specrt_set_log(nullptr, nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_close(reinterpret_cast<specrt_params*>(1)));
  THAT(lines.size() == 3);
  specrt::set_log([](int, std::string_view message) { lines.emplace_back(message); });
  THAT(check::status_of([] { specrt::Generator("missing"); }) == SPECRT_BUNDLE);
  THAT(lines.back() == "no bundle is at missing");
  specrt::set_log({});
}

CHECK_CASE(chunk_by_chunk) {
  check::Opened opened;
  specrt_session* const session = opened.session.get();
  const specrt_chunk* chunk = nullptr;
  std::uint64_t one = 0, two = 0;
  GIVES(SPECRT_OK, begin(opened.session, "count 2", &one));
  REFUSES(SPECRT_BUSY, begin(opened.session, "count 2"), "not read to its end");
  GIVES(SPECRT_BUSY, generate(opened.session, "count 2"));
  for (std::size_t i = 0; i < 2; ++i) {
    GIVES(SPECRT_OK, specrt_next(session, one, &chunk));
    THAT(chunk != nullptr && chunk->count == 1 && chunk->bytes == 3 && chunk->accepted == i);
    THAT(chunk != nullptr && chunk->generation == one);
  }
  THAT(reason(opened.session).empty());
  for (int i = 0; i < 2; ++i) {
    GIVES(SPECRT_OK, specrt_next(session, one, &chunk));
    THAT(chunk == nullptr);
  }
  GIVES(SPECRT_OK, specrt_session_cancel(session, one));
  THAT(reason(opened.session) == "length");
  GIVES(SPECRT_OK, begin(opened.session, "forever", &two));
  GIVES(SPECRT_OK, specrt_next(session, two, &chunk));
  GIVES(SPECRT_OK, specrt_session_cancel(session, two));
  for (int i = 0; i < 2; ++i) {
    GIVES(SPECRT_CANCELLED, specrt_next(session, two, &chunk));
    THAT(chunk == nullptr);
  }
  THAT(reason(opened.session) == "cancelled");
  GIVES(SPECRT_OK, begin(opened.session, "forever"));
  for (int i = 0; i < 2; ++i) GIVES(SPECRT_OK, specrt_session_end(session, SPECRT_ANY_GENERATION));
  THAT(reason(opened.session) == "cancelled");
  GIVES(SPECRT_OK, begin(opened.session, "forever"));
  GIVES(SPECRT_OK, specrt_session_cancel(session, SPECRT_ANY_GENERATION));
  GIVES(SPECRT_OK, begin(opened.session, "count 1"));  // cancelled, and never read
}

CHECK_CASE(generations) {
  check::Opened opened;
  specrt_session* const session = opened.session.get();
  const specrt_chunk* chunk = nullptr;
  std::uint64_t old = 0, now = 0;
  GIVES(SPECRT_OK, specrt_session_cancel(session, SPECRT_ANY_GENERATION));
  GIVES(SPECRT_OK, begin(opened.session, "forever", &old));
  GIVES(SPECRT_OK, specrt_session_cancel(session, old));
  GIVES(SPECRT_OK, begin(opened.session, "count 2", &now));
  THAT(old == 1 && now == 2);
  GIVES(SPECRT_OK, specrt_session_cancel(session, old));
  REFUSES(SPECRT_CANCELLED, specrt_next(session, old, &chunk), "generation 2 has followed");
  for (int i = 0; i < 2; ++i) {
    GIVES(SPECRT_OK, specrt_next(session, now, &chunk));
    THAT(chunk != nullptr && chunk->generation == now);
  }
  GIVES(SPECRT_OK, specrt_next(session, now, &chunk));
  for (const std::uint64_t never : {std::uint64_t{3}, UINT64_MAX}) {
    REFUSES(SPECRT_INVALID_ARGUMENT, specrt_next(session, never, &chunk), "was never begun");
    REFUSES(SPECRT_INVALID_ARGUMENT, specrt_session_cancel(session, never), "was never begun");
    REFUSES(SPECRT_INVALID_ARGUMENT, specrt_session_end(session, never), "was never begun");
  }
  REFUSES(SPECRT_INVALID_ARGUMENT, specrt_next(session, 0, &chunk), "generation is 0");
  GIVES(SPECRT_OK, generate(opened.session, "count 1", [&](const specrt_chunk& third) {
          THAT(third.generation == 3);
          GIVES(SPECRT_CANCELLED, specrt_next(session, old, &chunk));  // takes no turn
          return 0;
        }));
}

CHECK_CASE(failures) {
  check::Opened opened;
  const specrt::Session& session = opened.session;
  REFUSES(SPECRT_ENGINE, generate(session, "fail"), "the pass failed");  // in one line
  THAT(reason(session) == "error" && session.text() == "ab ");
  GIVES(SPECRT_INTERNAL, generate(session, "bug"));
  GIVES(SPECRT_INTERNAL, generate(session, "odd"));
  GIVES(SPECRT_CAPACITY, generate(session, "refuse"));
  THAT(check::status_of([&] { session.text(); }) == SPECRT_INVALID_ARGUMENT);
  REFUSES(SPECRT_INVALID_ARGUMENT, generate(session, "count \xFF"),
          "prompt is not UTF-8 at byte 6");
  GIVES(SPECRT_OK, generate(session, "count 0"));
  THAT(session.text().empty());
}

CHECK_CASE(tokenizer) {
  check::Opened opened;
  specrt_generator* const generator = opened.generator.get();
  std::int64_t ids[3] = {-1, -1, -1};
  std::size_t count = 0;
  GIVES(SPECRT_OK, specrt_encode(generator, "abc", 3, ids, 2, &count));
  THAT(count == 3 && ids[0] == 'a' && ids[1] == 'b' && ids[2] == -1);
  const std::int64_t given[] = {'a', 0, 'b', 100};
  char text[8] = "zzzzzzz";
  GIVES(SPECRT_OK, specrt_decode(generator, given, 3, text, 3, &count));
  THAT(count == 4 && std::strcmp(text, "a") == 0 && text[3] == 'z');  // no half of a character
  GIVES(SPECRT_OK, specrt_decode(generator, given, 3, text, 5, &count));
  THAT(std::string(text) == std::string("a\xC3\xA9") + "b");
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_decode(generator, given, 4, text, 8, &count));
  specrt::Generator blind("blind");
  GIVES(SPECRT_UNSUPPORTED, specrt_encode(blind.get(), "abc", 3, ids, 3, &count));
}

CHECK_CASE(callbacks) {
  check::Opened opened;
  specrt::Session& session = opened.session;
  int chunks = 0;
  const auto cancels = [&](const specrt_chunk& chunk) {
    THAT(chunk.text[chunk.bytes] == '\0' && ++chunks == 1);
    session.cancel();
    return 0;
  };
  GIVES(SPECRT_CANCELLED, generate(session, "forever", cancels));
  const auto throws = [](const specrt_chunk&) -> int32_t { throw std::runtime_error("no room"); };
  REFUSES(SPECRT_CALLBACK, generate(session, "forever", throws), "the callback threw: no room");
  THAT(reason(session) == "error");
  const auto throws_oddly = [](const specrt_chunk&) -> int32_t { throw 1; };
  GIVES(SPECRT_CALLBACK, generate(session, "forever", throws_oddly));
  const auto calls = [&](const specrt_chunk& told) {
    const specrt_chunk* chunk = nullptr;
    GIVES(SPECRT_BUSY, generate(session, "count 1"));
    GIVES(SPECRT_BUSY, begin(session, "count 1"));
    GIVES(SPECRT_BUSY, specrt_next(session.get(), told.generation, &chunk));
    THAT(session.stats().finish_reason.empty() &&
         session.text().size() == session.ids().size() * 3);
    std::thread other([&] { THAT(check::status_of([&] { session.stats(); }) == SPECRT_BUSY); });
    other.join();
    REFUSES(SPECRT_BUSY, specrt_shutdown(), "inside a callback");
    GIVES(SPECRT_OK, generate(opened.generator.session(), "count 3"));
    return 0;
  };
  GIVES(SPECRT_OK, generate(session, "count 2", calls));
  GIVES(SPECRT_CANCELLED, generate(session, "forever", [&](const specrt_chunk& chunk) {
          REFUSES(SPECRT_BUSY, specrt_session_end(session.get(), chunk.generation), "is cancelled");
          return 0;
        }));
  GIVES(SPECRT_CLOSED, generate(session, "forever", [&](const specrt_chunk&) {
          GIVES(SPECRT_OK, specrt_session_close(session.get()));
          GIVES(SPECRT_CLOSED, specrt_session_close(session.get()));
          return 0;
        }));
  const specrt::Session other = opened.generator.session();
  GIVES(SPECRT_CLOSED, generate(other, "forever", [&](const specrt_chunk&) {
          opened.generator.close();
          GIVES(SPECRT_CLOSED, generate(other, "count 1"));
          return 0;
        }));
  THAT(specrt::fake::alive().hosts == 0);
}

CHECK_CASE(processors) {
  using Scores = std::int32_t (*)(void*, const int64_t*, std::size_t, float*, std::size_t);
  check::Opened opened;
  const auto process = [&](Scores processor) {
    specrt::Params params;
    GIVES(SPECRT_OK, specrt_params_add_processor(params.get(), processor, nullptr));
    return generate(opened.session, "process", nullptr, &params);
  };
  REFUSES(SPECRT_CALLBACK, process([](void*, const int64_t*, std::size_t, float*, std::size_t) {
            GIVES(SPECRT_BUSY, specrt_shutdown());
            return -3;
          }),
          "a logits processor returned -3; expected 0");
  REFUSES(SPECRT_CALLBACK,
          process([](void*, const int64_t*, std::size_t, float*, std::size_t) -> int32_t {
            throw std::logic_error("scores are odd");
          }),
          "a logits processor threw: scores are odd");
  REFUSES(SPECRT_CALLBACK,
          process([](void*, const int64_t*, std::size_t, float* scores, std::size_t) -> int32_t {
            scores[3] = std::numeric_limits<float>::quiet_NaN();
            return 0;
          }),
          "a logits processor left NaN or infinity");
  REFUSES(SPECRT_CALLBACK,
          process([](void*, const int64_t*, std::size_t, float* scores, std::size_t size) {
            scores[size - 1] = std::numeric_limits<float>::infinity();
            return 0;
          }),
          "a logits processor left NaN or infinity");
  GIVES(SPECRT_OK, process([](void*, const int64_t*, std::size_t, float* scores, std::size_t) {
          scores[0] = -std::numeric_limits<float>::infinity();
          return 0;
        }));
}
