#include <memory>
#include <utility>

#include "native/check.hpp"
#include "native/drafting.hpp"
#include "native/numbers.hpp"
#include "native/speculation/adaptive.hpp"
#include "native/speculation/gamma.hpp"

namespace specrt::checks {

using native::AutoGamma;
using native::Json;

namespace {

struct Policy {
  std::shared_ptr<AutoGamma> adaptive;
  std::shared_ptr<native::GammaPolicy> asked;  // it, or it kept to the gammas that were built
};

enum Event { kChose, kWeighed, kObserved };

}  // namespace

static Policy policy_of(const Json& fields, const std::vector<Policy>& others) {
  Policy made;
  const int most = static_cast<int>(fields.at("most").integer());
  const Json& rival = fields.at("rival");
  made.adaptive = std::make_shared<AutoGamma>(
      costs_of(fields), most, rival.is_null() ? nullptr : others.at(size_of(rival)).adaptive);
  made.asked = made.adaptive;
  std::vector<int> gammas;
  for (const Json& gamma : fields.at("gammas").items()) {
    gammas.push_back(static_cast<int>(gamma.integer()));
  }
  if (!gammas.empty()) made.asked = std::make_shared<native::BuiltGamma>(made.adaptive, gammas);
  return made;
}

static int observe(const std::string& name, const Policy& policy, const std::vector<Json>& event) {
  native::Round round;
  round.tokens.resize(size_of(event[2]));
  round.drafted = size_of(event[3]);
  round.accepted = size_of(event[4]);
  round.draft_ns = event[5].integer();
  round.verify_ns = event[6].integer();
  round.caught_up = event[7].integer() != 0;
  policy.asked->observe(round);
  const std::string expected = event[9].is_null() ? "none" : event[9].text();
  const std::string found = policy.adaptive->fallback().value_or("none");
  return equal(name + ": rate", policy.adaptive->rate(), event[8].number()) +
         (found == expected ? 0 : differs(name + ": fallback", found, expected));
}

static int replay(const std::string& name, const Policy& policy, const std::vector<Json>& event) {
  switch (event[1].integer()) {
    case kChose:
      return same(name + ": gamma", Token{policy.asked->choose()}, event[2].integer());
    case kWeighed: {
      const int drafted = static_cast<int>(event[2].integer());
      const auto weight = policy.asked->weigh(drafted, event[3].number());
      return same(name + ": weight", static_cast<Token>(weight), event[4].integer());
    }
    default:
      return observe(name, policy, event);
  }
}

int check_gamma(const Json& vectors) {
  int wrong = 0;
  for (const Json& fields : vectors.at("cases").items()) {
    std::vector<Policy> policies;
    for (const Json& policy : fields.at("policies").items()) {
      policies.push_back(policy_of(policy, policies));
    }
    int found = 0, number = 0;
    for (const Json& event : fields.at("events").items()) {
      if (found > 0) break;  // what follows differs too
      const auto& items = event.items();
      const std::string name = fields.at("name").text() + ", " + std::to_string(number++);
      found += replay(name, policies.at(size_of(items[0])), items);
    }
    wrong += found;
  }
  return wrong;
}

static const Registered kRegistered("gamma", check_gamma);

}  // namespace specrt::checks
