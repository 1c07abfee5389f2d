#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>

#include "abi/check.hpp"

namespace check {

namespace {

std::map<std::string, void (*)()>& checks() {
  static std::map<std::string, void (*)()> known;
  return known;
}

std::atomic<int> wrong{0};

}  // namespace

Registered::Registered(const char* name, void (*check)()) { checks()[name] = check; }

void that(bool holds, const char* what, int line) {
  if (holds) return;
  ++wrong;
  std::printf("line %d: %s does not hold\n", line, what);
}

void gives(specrt_status expected, specrt_status status, const char* words, const char* what,
           int line) {
  const char* said = specrt_last_error();
  if (status == expected && std::strstr(status == SPECRT_OK ? "" : said, words) != nullptr) return;
  ++wrong;
  std::printf("line %d: %s gave %s (%s), expected %s (%s)\n", line, what,
              specrt_status_name(status), said, specrt_status_name(expected), words);
}

specrt_status generate(const specrt::Session& session, const std::string& prompt,
                       const std::function<int32_t(const specrt_chunk&)>& callback,
                       const specrt::Params* params) {
  const auto call = [](void* user, const specrt_chunk* chunk) {
    return (*static_cast<const std::function<int32_t(const specrt_chunk&)>*>(user))(*chunk);
  };
  return specrt_generate(session.get(), prompt.data(), prompt.size(),
                         params ? params->get() : nullptr,
                         callback ? specrt_callback{call} : nullptr,
                         const_cast<std::function<int32_t(const specrt_chunk&)>*>(&callback));
}

specrt_status begin(const specrt::Session& session, const std::string& prompt,
                    std::uint64_t* generation) {
  std::uint64_t unused = 0;
  return specrt_begin(session.get(), prompt.data(), prompt.size(), nullptr,
                      generation == nullptr ? &unused : generation);
}

static int run(const char* name) {
  checks().at(name)();
  const auto& alive = specrt::fake::alive();
  THAT(alive.hosts == 0 && alive.slots == 0 && alive.runs == 0 && alive.misuses == 0);
  std::printf("%s: %d wrong\n", name, wrong.load());
  return wrong == 0 ? 0 : 1;
}

}  // namespace check

int main(int count, char** arguments) {
  if (count == 2 && std::strcmp(arguments[1], "--list") != 0) return check::run(arguments[1]);
  for (const auto& [name, unused] : check::checks()) std::printf("%s\n", name.c_str());
  return 0;
}
