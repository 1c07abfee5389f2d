#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <thread>

#include "abi/check.hpp"
#include "fake/fake.hpp"

namespace check {

namespace {

std::map<std::string, void (*)()>& checks() {
  static std::map<std::string, void (*)()> known;
  return known;
}

std::atomic<int> wrong{0};

}  // namespace

Registered::Registered(const char* name, void (*check)()) { checks()[name] = check; }

void that(bool holds, const char* what, const char* file, int line) {
  if (holds) return;
  ++wrong;
  std::printf("%s:%d: %s does not hold\n", file, line, what);
}

void same(specrt_status found, specrt_status expected, const char* what, const char* file,
          int line) {
  if (found == expected) return;
  ++wrong;
  std::printf("%s:%d: %s gave %s (%s), expected %s\n", file, line, what, specrt_status_name(found),
              specrt_last_error(), specrt_status_name(expected));
}

void says(const char* words, const char* file, int line) {
  if (std::strstr(specrt_last_error(), words) != nullptr) return;
  ++wrong;
  std::printf("%s:%d: the message is \"%s\", expected \"%s\" in it\n", file, line,
              specrt_last_error(), words);
}

Opened::Opened(const char* bundle) { GIVES(SPECRT_OK, specrt_open(bundle, nullptr, &generator)); }

Opened::~Opened() { specrt_generator_close(generator); }

specrt_session* Opened::session() {
  specrt_session* made = nullptr;
  GIVES(SPECRT_OK, specrt_session_create(generator, &made));
  return made;
}

specrt_status generate(specrt_session* session, const std::string& prompt, specrt_callback callback,
                       void* user, specrt_params* params) {
  return specrt_generate(session, prompt.data(), prompt.size(), params, callback, user);
}

specrt_status begin(specrt_session* session, const std::string& prompt, specrt_params* params) {
  return specrt_begin(session, prompt.data(), prompt.size(), params);
}

std::string finish_reason(specrt_session* session) {
  specrt_stats stats{};
  stats.size = sizeof stats;
  GIVES(SPECRT_OK, specrt_session_stats(session, &stats));
  return stats.finish_reason == nullptr ? "none" : stats.finish_reason;
}

void wait_blocked(int passes) {
  while (specrt::fake::alive().blocked < passes) std::this_thread::yield();
}

static int run(const char* name) {
  const auto found = checks().find(name);
  if (found == checks().end()) {
    std::printf("no check is called %s\n", name);
    return 2;
  }
  found->second();
  const auto& alive = specrt::fake::alive();
  THAT(alive.hosts == 0);
  THAT(alive.slots == 0);
  THAT(alive.runs == 0);
  THAT(alive.misuses == 0);
  std::printf("%s: %d wrong\n", name, wrong.load());
  return wrong == 0 ? 0 : 1;
}

}  // namespace check

int main(int count, char** arguments) {
  if (count == 2 && std::strcmp(arguments[1], "--list") == 0) {
    for (const auto& [name, unused] : check::checks()) std::printf("%s\n", name.c_str());
    return 0;
  }
  if (count != 2) {
    std::printf("usage: abi_check NAME | --list\n");
    return 2;
  }
  return check::run(arguments[1]);
}
