// What generations come to, statuses of what fails, and structures of other versions.
#include <cstring>

#include "abi/check.hpp"

namespace {

// A structure in front of the space that a newer header would give it.
template <typename Struct>
struct Newer {
  Struct known;
  unsigned char more[64];
};

}  // namespace

CHECK_CASE(library) {
  THAT(specrt_abi_version() == SPECRT_ABI_VERSION);
  THAT(std::strstr(specrt_version(), " fake") != nullptr);
  THAT(specrt_last_error()[0] == '\0');
  THAT(std::strcmp(specrt_status_name(SPECRT_BUSY), "SPECRT_BUSY") == 0);
  THAT(specrt_status_name(-7) != nullptr);
  for (specrt_status status = SPECRT_OK; status <= SPECRT_INTERNAL; ++status) {
    THAT(std::strncmp(specrt_status_name(status), "SPECRT_", 7) == 0);
  }
}

CHECK_CASE(opening) {
  specrt_generator* generator = nullptr;
  GIVES(SPECRT_BUNDLE, specrt_open("missing", nullptr, &generator));
  SAYS("no bundle is at missing");
  THAT(generator == nullptr);
  GIVES(SPECRT_INTERNAL, specrt_open("memory", nullptr, &generator));
  SAYS("no memory is left");
  GIVES(SPECRT_INTERNAL, specrt_open("bug", nullptr, &generator));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_open("b\xFFg", nullptr, &generator));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_open("", nullptr, &generator));
  SAYS("bundle is ''; expected the path");
  specrt_open_options options{};
  options.size = sizeof options;
  options.threads = -1;
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_open("any", &options, &generator));
  SAYS("threads is -1; expected");
  options.threads = 77;  // a status of OK is not let through as a failure
  GIVES(SPECRT_INTERNAL, specrt_open("any", &options, &generator));
}

CHECK_CASE(sizes) {
  specrt_generator* generator = nullptr;
  Newer<specrt_open_options> options{};
  for (const std::size_t size :
       {std::size_t{0}, sizeof(std::size_t), sizeof(specrt_open_options) - 1, SIZE_MAX}) {
    options.known.size = size;
    GIVES(SPECRT_INVALID_ARGUMENT, specrt_open("any", &options.known, &generator));
    SAYS("specrt_open_options->size is");
  }
  options.known.size = sizeof options;
  options.more[63] = 1;
  GIVES(SPECRT_UNSUPPORTED, specrt_open("any", &options.known, &generator));
  SAYS("use a newer library");
  options.more[63] = 0;
  GIVES(SPECRT_OK, specrt_open("any", &options.known, &generator));
  Newer<specrt_info> info{};
  std::memset(info.more, 0x5A, sizeof info.more);
  info.known.size = sizeof(specrt_info) - 8;
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_generator_info(generator, &info.known));
  THAT(info.known.name == nullptr);
  info.known.size = sizeof info;
  GIVES(SPECRT_OK, specrt_generator_info(generator, &info.known));
  THAT(info.known.size == sizeof info);
  THAT(std::strcmp(info.known.backend, "fake") == 0);
  THAT(info.known.vocabulary == 100 && info.known.has_tokenizer == 1 && info.known.rows == 2);
  THAT(info.more[0] == 0x5A && info.more[63] == 0x5A);
  GIVES(SPECRT_OK, specrt_generator_close(generator));
}

CHECK_CASE(completion) {
  check::Opened opened;
  specrt_session* session = opened.session();
  GIVES(SPECRT_OK, check::generate(session, "count 5"));
  const char* text = nullptr;
  const std::int64_t* ids = nullptr;
  std::size_t size = 0;
  GIVES(SPECRT_OK, specrt_session_text(session, &text, &size));
  THAT(std::string(text, size) == "ab ab ab ab ab ");
  GIVES(SPECRT_OK, specrt_session_ids(session, &ids, &size));
  THAT(size == 5 && ids[4] == 4);
  GIVES(SPECRT_OK, specrt_session_json(session, &text, &size));
  THAT(std::string(text, size) == "{\"chunks\": 5}");
  specrt_stats stats{};
  stats.size = 3;
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_session_stats(session, &stats));
  stats.size = sizeof stats;
  GIVES(SPECRT_OK, specrt_session_stats(session, &stats));
  THAT(stats.completion_tokens == 5 && stats.prompt_tokens == 7 && stats.rounds == 4);
  THAT(stats.acceptance_rate == 0.5 && stats.draft_yield == 0.25 && stats.tokens_per_round == 3.0);
  THAT(stats.gamma == -1 && stats.seed == 11 && std::strcmp(stats.drafter, "model") == 0);
  THAT(std::strcmp(stats.finish_reason, "length") == 0 && stats.fallback[0] == '\0');
  const std::int64_t prompt[] = {9, 8};
  GIVES(SPECRT_OK, specrt_generate_ids(session, prompt, 2, nullptr, nullptr, nullptr));
  GIVES(SPECRT_OK, specrt_session_ids(session, &ids, &size));
  THAT(size == 2 && ids[0] == 9 && ids[1] == 8);
  const std::int64_t beyond[] = {9, 100};
  GIVES(SPECRT_INVALID_ARGUMENT,
        specrt_generate_ids(session, beyond, 2, nullptr, nullptr, nullptr));
  SAYS("token id 100 is not in the vocabulary of 0 to 99");
}

CHECK_CASE(chunk_by_chunk) {
  check::Opened opened;
  specrt_session* session = opened.session();
  const specrt_chunk* chunk = nullptr;
  GIVES(SPECRT_OK, check::begin(session, "count 2"));
  THAT(check::finish_reason(session).empty());
  GIVES(SPECRT_BUSY, check::begin(session, "count 2"));
  SAYS("not read to its end");
  GIVES(SPECRT_BUSY, check::generate(session, "count 2"));
  for (std::size_t i = 0; i < 2; ++i) {
    GIVES(SPECRT_OK, specrt_next(session, &chunk));
    THAT(chunk != nullptr && chunk->count == 1 && chunk->bytes == 3 && chunk->accepted == i);
  }
  THAT(check::finish_reason(session).empty());
  for (int i = 0; i < 2; ++i) {
    GIVES(SPECRT_OK, specrt_next(session, &chunk));
    THAT(chunk == nullptr);
  }
  THAT(check::finish_reason(session) == "length");
  GIVES(SPECRT_OK, specrt_session_cancel(session));
  THAT(check::finish_reason(session) == "length");
  GIVES(SPECRT_OK, check::begin(session, "forever"));
  GIVES(SPECRT_OK, specrt_next(session, &chunk));
  GIVES(SPECRT_OK, specrt_session_cancel(session));
  for (int i = 0; i < 2; ++i) {
    GIVES(SPECRT_CANCELLED, specrt_next(session, &chunk));
    THAT(chunk == nullptr);
  }
  THAT(check::finish_reason(session) == "cancelled");
  GIVES(SPECRT_OK, check::begin(session, "forever"));
  GIVES(SPECRT_OK, specrt_session_cancel(session));
  GIVES(SPECRT_OK, check::begin(session, "count 1"));  // cancelled, and never read
}

CHECK_CASE(failures) {
  check::Opened opened;
  specrt_session* session = opened.session();
  GIVES(SPECRT_ENGINE, check::generate(session, "fail"));
  SAYS("the pass failed");  // in one line
  THAT(check::finish_reason(session) == "error");
  const char* text = nullptr;
  std::size_t bytes = 0;
  GIVES(SPECRT_OK, specrt_session_text(session, &text, &bytes));
  THAT(std::string(text, bytes) == "ab ");
  GIVES(SPECRT_INTERNAL, check::generate(session, "bug"));
  GIVES(SPECRT_INTERNAL, check::generate(session, "odd"));
  GIVES(SPECRT_CAPACITY, check::generate(session, "refuse"));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_session_text(session, &text, &bytes));
  GIVES(SPECRT_INVALID_ARGUMENT, check::generate(session, "count \xFF"));
  SAYS("prompt is not UTF-8 at byte 6");
  GIVES(SPECRT_OK, check::generate(session, "count 0"));
  GIVES(SPECRT_OK, specrt_session_text(session, &text, &bytes));
  THAT(bytes == 0 && text != nullptr && text[0] == '\0');
}

CHECK_CASE(tokenizer) {
  check::Opened opened;
  std::int64_t ids[3] = {-1, -1, -1};
  std::size_t count = 0;
  GIVES(SPECRT_OK, specrt_encode(opened.generator, "abc", 3, ids, 2, &count));
  THAT(count == 3 && ids[0] == 'a' && ids[1] == 'b' && ids[2] == -1);
  GIVES(SPECRT_OK, specrt_encode(opened.generator, "", 0, nullptr, 0, &count));
  THAT(count == 0);
  const std::int64_t given[] = {'a', 0, 'b'};
  char text[8] = "zzzzzzz";
  GIVES(SPECRT_OK, specrt_decode(opened.generator, given, 3, nullptr, 0, &count));
  THAT(count == 4);
  GIVES(SPECRT_OK, specrt_decode(opened.generator, given, 3, text, 3, &count));
  THAT(count == 4 && std::strcmp(text, "a") == 0 && text[3] == 'z');  // no half of a character
  GIVES(SPECRT_OK, specrt_decode(opened.generator, given, 3, text, 5, &count));
  THAT(std::strcmp(text,
                   "a\xC3\xA9"
                   "b") == 0);
  const std::int64_t beyond = 100;
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_decode(opened.generator, &beyond, 1, text, 8, &count));
  check::Opened blind("blind");
  GIVES(SPECRT_UNSUPPORTED, specrt_encode(blind.generator, "abc", 3, ids, 3, &count));
}
