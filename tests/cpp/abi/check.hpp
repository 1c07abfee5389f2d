// Holds the C interface to its header, over an implementation without a model.
#pragma once

#include <functional>
#include <string>

#include "fake/fake.hpp"
#include "specrt/specrt.h"

namespace check {

// Makes `abi_check NAME` run a check.
struct Registered {
  Registered(const char* name, void (*check)());
};

// Count and print what is not as expected: a condition; a status, and words in its message.
void that(bool holds, const char* what, int line);
void gives(specrt_status expected, specrt_status status, const char* words, const char* what,
           int line);

// An open bundle that closes itself.
class Opened {
 public:
  explicit Opened(const char* bundle = "any");
  ~Opened() { specrt_generator_close(generator); }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;
  specrt_session* session();

  specrt_generator* generator = nullptr;
};

specrt_params* params();
// Generate; the callback, where there is one, is called with each chunk.
specrt_status generate(specrt_session* session, const std::string& prompt,
                       const std::function<int32_t(const specrt_chunk&)>& callback = nullptr,
                       specrt_params* params = nullptr);
specrt_status begin(specrt_session* session, const std::string& prompt);
std::string finish_reason(specrt_session* session);

}  // namespace check

#define CHECK_CASE(name)                                         \
  static void name();                                            \
  static const check::Registered registered_##name(#name, name); \
  static void name()
#define THAT(condition) check::that((condition), #condition, __LINE__)
#define GIVES(status, call) check::gives((status), (call), "", #call, __LINE__)
#define REFUSES(status, call, words) check::gives((status), (call), (words), #call, __LINE__)
