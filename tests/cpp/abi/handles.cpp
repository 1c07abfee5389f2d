// Handles: NULL, closed, of another kind, never given out; and every function with NULL.
#include <cstdint>
#include <set>

#include "abi/check.hpp"
#include "fake/fake.hpp"

namespace {

template <typename To, typename From>
To* as(From* handle) {
  return reinterpret_cast<To*>(handle);
}

specrt_params* made_params() {
  specrt_params* params = nullptr;
  GIVES(SPECRT_OK, specrt_params_create(&params));
  return params;
}

}  // namespace

CHECK_CASE(null_library) {
  specrt_generator* generator = nullptr;
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_open(nullptr, nullptr, &generator));
  SAYS("bundle is NULL");
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_open("any", nullptr, nullptr));
  GIVES(SPECRT_OK, specrt_generator_close(nullptr));
  GIVES(SPECRT_OK, specrt_session_close(nullptr));
  GIVES(SPECRT_OK, specrt_params_close(nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_session_create(nullptr, nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_generator_info(nullptr, nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_create(nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_encode(nullptr, nullptr, 0, nullptr, 0, nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_decode(nullptr, nullptr, 0, nullptr, 0, nullptr));
  SAYS("generator is NULL; pass what specrt_open gave");
}

CHECK_CASE(null_session) {
  check::Opened opened;
  specrt_session* session = opened.session();
  const specrt_chunk* chunk = nullptr;
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_session_create(opened.generator, nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_generator_info(opened.generator, nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_generate(session, nullptr, 0, nullptr, nullptr, nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_begin(session, nullptr, 4, nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT,
        specrt_generate_ids(session, nullptr, 3, nullptr, nullptr, nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_begin_ids(session, nullptr, 0, nullptr));
  SAYS("the prompt has no tokens");
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_next(session, nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_next(session, &chunk));
  SAYS("nothing was generated");
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_session_stats(session, nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_session_text(session, nullptr, nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_session_ids(session, nullptr, nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_session_json(session, nullptr, nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_generate(nullptr, "a", 1, nullptr, nullptr, nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT,
        specrt_generate_ids(nullptr, nullptr, 0, nullptr, nullptr, nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_begin(nullptr, "a", 1, nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_begin_ids(nullptr, nullptr, 0, nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_next(nullptr, &chunk));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_session_cancel(nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_session_stats(nullptr, nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_session_text(nullptr, nullptr, nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_session_ids(nullptr, nullptr, nullptr));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_session_json(nullptr, nullptr, nullptr));
  size_t count = 9;
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_encode(opened.generator, "a", 1, nullptr, 2, &count));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_encode(opened.generator, nullptr, 1, nullptr, 0, &count));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_decode(opened.generator, nullptr, 2, nullptr, 0, &count));
}

CHECK_CASE(null_params) {
  specrt_params* params = made_params();
  const int64_t id = 1;
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_set_integer(params, nullptr, 1));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_set_number(params, nullptr, 1));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_set_text(params, nullptr, "a", 1));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_set_text(params, "regex", nullptr, 1));
  SAYS("regex is NULL");
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_add_text(params, "stop", nullptr, 1));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_add_tokens(params, "stop_token_ids", nullptr, 1));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_add_tokens(params, nullptr, &id, 1));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_add_tokens(params, "stop_token_ids", &id, SIZE_MAX));
  SAYS("the length of ids");
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_add_processor(params, nullptr, nullptr));
  SAYS("expected a function");
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_set_integer(nullptr, "top_k", 1));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_set_number(nullptr, "top_p", 1));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_set_text(nullptr, "regex", "a", 1));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_add_text(nullptr, "stop", "a", 1));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_add_tokens(nullptr, "stop_token_ids", &id, 1));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_add_bias(nullptr, 1, 1));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_add_processor(nullptr, nullptr, nullptr));
  GIVES(SPECRT_OK, specrt_params_close(params));
}

CHECK_CASE(closed_handles) {
  check::Opened opened;
  specrt_session* session = opened.session();
  specrt_params* params = made_params();
  const specrt_chunk* chunk = nullptr;
  GIVES(SPECRT_OK, specrt_params_close(params));
  GIVES(SPECRT_CLOSED, specrt_params_close(params));
  GIVES(SPECRT_CLOSED, specrt_params_set_integer(params, "top_k", 1));
  GIVES(SPECRT_CLOSED, check::generate(session, "count 1", nullptr, nullptr, params));
  SAYS("params was closed");
  GIVES(SPECRT_OK, specrt_session_close(session));
  GIVES(SPECRT_CLOSED, specrt_session_close(session));
  GIVES(SPECRT_CLOSED, check::generate(session, "count 1"));
  GIVES(SPECRT_CLOSED, specrt_session_cancel(session));
  GIVES(SPECRT_CLOSED, specrt_next(session, &chunk));
  specrt_session* other = opened.session();
  GIVES(SPECRT_OK, specrt_generator_close(opened.generator));
  THAT(specrt::fake::alive().hosts == 0);
  GIVES(SPECRT_CLOSED, specrt_generator_close(opened.generator));
  GIVES(SPECRT_CLOSED, specrt_session_create(opened.generator, &session));
  THAT(session == nullptr);
  GIVES(SPECRT_CLOSED, check::generate(other, "count 1"));
  SAYS("or its generator was");
  GIVES(SPECRT_CLOSED, specrt_session_close(other));
}

CHECK_CASE(wrong_kinds) {
  check::Opened opened;
  specrt_session* session = opened.session();
  specrt_params* params = made_params();
  specrt_session* out = nullptr;
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_session_create(as<specrt_generator>(session), &out));
  SAYS("generator is the handle of a session; pass what specrt_open gave");
  GIVES(SPECRT_INVALID_ARGUMENT, check::generate(as<specrt_session>(opened.generator), "count 1"));
  GIVES(SPECRT_INVALID_ARGUMENT, check::generate(as<specrt_session>(params), "count 1"));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_generator_close(as<specrt_generator>(params)));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_session_close(as<specrt_session>(opened.generator)));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_close(as<specrt_params>(session)));
  GIVES(SPECRT_INVALID_ARGUMENT,
        check::generate(session, "count 1", nullptr, nullptr, as<specrt_params>(session)));
  int local = 0;
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_session_close(as<specrt_session>(&local)));
  SAYS("no handle of this library");
  for (std::uintptr_t odd :
       {std::uintptr_t{1}, std::uintptr_t{4}, std::uintptr_t{8}, UINTPTR_MAX}) {
    GIVES(SPECRT_INVALID_ARGUMENT, specrt_session_close(reinterpret_cast<specrt_session*>(odd)));
  }
  GIVES(SPECRT_OK, specrt_params_close(params));
}

CHECK_CASE(handles_are_new) {
  check::Opened opened;
  std::set<specrt_session*> seen;
  for (int i = 0; i < 100; ++i) {
    specrt_session* session = opened.session();
    THAT(seen.insert(session).second);
    GIVES(SPECRT_OK, specrt_session_close(session));
  }
}
