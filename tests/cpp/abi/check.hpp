// Holds the C interface to its header, over an implementation without a model.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "specrt/specrt.h"

namespace check {

// Makes `abi_check NAME` run a check.
struct Registered {
  Registered(const char* name, void (*check)());
};

// Count and print what is not as expected.
void that(bool holds, const char* what, const char* file, int line);
void same(specrt_status found, specrt_status expected, const char* what, const char* file,
          int line);
// The message of the last failure of this thread holds these words.
void says(const char* words, const char* file, int line);

// Open handles that close themselves.
class Opened {
 public:
  explicit Opened(const char* bundle = "any");
  ~Opened();
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;
  specrt_session* session();

  specrt_generator* generator = nullptr;
};

specrt_status generate(specrt_session* session, const std::string& prompt,
                       specrt_callback callback = nullptr, void* user = nullptr,
                       specrt_params* params = nullptr);
specrt_status begin(specrt_session* session, const std::string& prompt,
                    specrt_params* params = nullptr);
std::string finish_reason(specrt_session* session);
// Wait until so many passes of the process are blocked.
void wait_blocked(int passes);

}  // namespace check

#define CHECK_CASE(name)                                         \
  static void name();                                            \
  static const check::Registered registered_##name(#name, name); \
  static void name()
#define THAT(condition) check::that((condition), #condition, __FILE__, __LINE__)
#define GIVES(status, call) check::same((call), (status), #call, __FILE__, __LINE__)
#define SAYS(words) check::says((words), __FILE__, __LINE__)
