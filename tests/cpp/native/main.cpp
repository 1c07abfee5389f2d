#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <map>

#include "native/check.hpp"

namespace specrt::checks {

static std::map<std::string, Check>& checks() {
  static std::map<std::string, Check> known;
  return known;
}

Registered::Registered(const char* name, Check check) { checks()[name] = check; }

int differs(const std::string& what, const std::string& found, const std::string& expected) {
  std::printf("%s: %s, expected %s\n", what.c_str(), found.c_str(), expected.c_str());
  return 1;
}

static int run(const char* name, const char* path) {
  const auto found = checks().find(name);
  if (found == checks().end()) {
    std::printf("no check is called %s\n", name);
    return 2;
  }
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const int wrong = found->second(native::Json::parse(text));
  std::printf("%s: %d differ\n", name, wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace specrt::checks

int main(int count, char** arguments) {
  if (count != 3) {
    std::printf("usage: native_check NAME FILE\n");
    return 2;
  }
  try {
    return specrt::checks::run(arguments[1], arguments[2]);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 2;
  }
}
