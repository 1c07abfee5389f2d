// Holds the C interface and its C++ header to what they say, over an implementation without a
// model.
#pragma once

#include <functional>
#include <specrt/specrt.hpp>
#include <string>

#include "fake/fake.hpp"

namespace check {

// Makes `abi_check NAME` run a check.
struct Registered {
  Registered(const char* name, void (*check)());
};

// Count and print what is not as expected: a condition; a status, and words in its message.
void that(bool holds, const char* what, int line);
void gives(specrt_status expected, specrt_status status, const char* words, const char* what,
           int line);

struct Opened {
  specrt::Generator generator{"any"};
  specrt::Session session = generator.session();
};

// Generate; the callback, where there is one, is called with each chunk.
specrt_status generate(const specrt::Session& session, const std::string& prompt,
                       const std::function<int32_t(const specrt_chunk&)>& callback = nullptr,
                       const specrt::Params* params = nullptr);
specrt_status begin(const specrt::Session& session, const std::string& prompt,
                    std::uint64_t* generation = nullptr);

// The status of what throws it.
template <typename Body>
specrt_status status_of(Body body) {
  try {
    body();
  } catch (const specrt::Error& error) {
    return error.status();
  }
  return SPECRT_OK;
}

}  // namespace check

#define CHECK_CASE(name)                                         \
  static void name();                                            \
  static const check::Registered registered_##name(#name, name); \
  static void name()
#define THAT(condition) check::that((condition), #condition, __LINE__)
#define GIVES(status, call) check::gives((status), (call), "", #call, __LINE__)
#define REFUSES(status, call, words) check::gives((status), (call), (words), #call, __LINE__)
