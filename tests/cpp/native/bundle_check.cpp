// Bundles of all kinds of damage: what opening them says.
#include <cstdio>

#include "native/bundle.hpp"
#include "native/check.hpp"
#include "native/json.hpp"

namespace specrt::checks {

namespace {

std::string outcome(const native::Json& one, const std::string& library) {
  OpenOptions options;
  options.onnxruntime = library;
  try {
    const auto threads = static_cast<int>(one.at("threads").integer());
    const native::Bundle bundle = native::open_folder(one.at("path").text(), threads, options);
    std::string said = bundle.tuning ? "tuned" : "opened";
    for (const std::string& notice : bundle.notices) said += ": " + notice;
    return said;
  } catch (const Failure& failure) {
    return "status " + std::to_string(failure.status()) + ": " + failure.what();
  }
}

}  // namespace

// What each bundle's opening says must hold a text, in one line that is not too long.
int check_bundle(const native::Json& vectors) {
  int wrong = 0;
  for (const native::Json& one : vectors.at("bundles").items()) {
    const std::string said = outcome(one, vectors.at("library").text());
    const std::string& expected = one.at("says").text();
    const bool fits =
        said.find('\n') == said.npos && said.size() < one.at("path").text().size() * 2 + 500;
    if (fits && said.find(expected) != said.npos) continue;
    std::printf("%s: %s, expected %s\n", one.at("name").text().c_str(), said.c_str(),
                expected.c_str());
    ++wrong;
  }
  return wrong;
}

static const Registered kRegistered("bundle", check_bundle);

}  // namespace specrt::checks
