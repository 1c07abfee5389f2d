// What the cases of this program share: opening, asking, and how they end where something is wrong.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "specrt/specrt.h"

namespace hosted {

inline const char* bundle = nullptr;
inline const char* python = nullptr;

constexpr char kPrompt[] = "def area(radius):\n";

inline void expect(specrt_status status, specrt_status expected = SPECRT_OK) {
  if (status == expected) return;
  std::printf("%s: %s, expected %s\n", specrt_status_name(status), specrt_last_error(),
              specrt_status_name(expected));
  std::exit(1);
}

inline specrt_generator* open_one(specrt_status expected = SPECRT_OK) {
  specrt_open_options options{};
  options.size = sizeof options;
  options.threads = 1;
  options.python = python;
  specrt_generator* generator = nullptr;
  expect(specrt_open(bundle, &options, &generator), expected);
  return generator;
}

inline specrt_params* params_of(int64_t tokens, double temperature) {
  specrt_params* params = nullptr;
  expect(specrt_params_create(&params));
  expect(specrt_params_set_integer(params, "max_tokens", tokens));
  expect(specrt_params_set_integer(params, "gamma", 2));
  expect(specrt_params_set_integer(params, "seed", 7));
  expect(specrt_params_set_number(params, "temperature", temperature));
  return params;
}

inline void begin(specrt_session* session, specrt_params* params) {
  expect(specrt_begin(session, kPrompt, std::strlen(kPrompt), params));
}

inline void print_json(specrt_session* session) {
  const char* json = nullptr;
  size_t bytes = 0;
  expect(specrt_session_json(session, &json, &bytes));
  std::printf("%s\n", json);
}

// The cases of sharing.cpp.
void closing_processor();
void returning();
void threads();
void memory();

}  // namespace hosted
