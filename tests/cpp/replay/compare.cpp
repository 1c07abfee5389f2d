#include "replay/compare.hpp"

#include <cmath>
#include <cstdio>

namespace specrt::checks {

using native::Json;

int differs(const std::string& what, const std::string& found, const std::string& expected) {
  if (found == expected) {
    return 0;
  }
  std::printf("%s:\n%s\nexpected:\n%s\n", what.c_str(), found.c_str(), expected.c_str());
  return 1;
}

static bool is_time(const std::string& name) {
  return name == "ttft_ms" || name == "itl_ms" || name == "tokens_per_second";
}

int compare(const std::string& place, const Json& found, const Json& expected) {
  if (found.kind() != expected.kind()) {
    return differs(place, "another kind of value", "");
  }
  int wrong = 0;
  switch (expected.kind()) {
    case Json::Kind::kObject:
      wrong += differs(place + ", fields", std::to_string(found.fields().size()),
                       std::to_string(expected.fields().size()));
      for (const auto& [name, value] : expected.fields()) {
        const bool skipped =
            is_time(name) || (value.is_null() && (name == "speculation" || name == "seed"));
        wrong += skipped ? found.find(name) == nullptr
                         : compare(place + "." + name, found.at(name), value);
      }
      return wrong;
    case Json::Kind::kList:
      wrong += differs(place + ", items", std::to_string(found.items().size()),
                       std::to_string(expected.items().size()));
      for (std::size_t i = 0; wrong == 0 && i < expected.items().size(); ++i) {
        wrong += compare(place + "." + std::to_string(i), found.items()[i], expected.items()[i]);
      }
      return wrong;
    case Json::Kind::kText:
      return differs(place, found.text(), expected.text());
    case Json::Kind::kBoolean:
      return found.boolean() == expected.boolean() ? 0 : differs(place, "the other", "");
    case Json::Kind::kInteger:
      return differs(place, std::to_string(found.integer()), std::to_string(expected.integer()));
    case Json::Kind::kNumber:
      return std::abs(found.number() - expected.number()) < 1e-9
                 ? 0
                 : differs(place, std::to_string(found.number()),
                           std::to_string(expected.number()));
    case Json::Kind::kNull:
      return 0;
  }
  return 1;
}

}  // namespace specrt::checks
