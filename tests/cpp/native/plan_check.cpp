#include "native/check.hpp"
#include "native/drafting.hpp"
#include "native/numbers.hpp"
#include "native/speculation/plan.hpp"

namespace specrt::checks {

using native::Json;

native::Costs costs_of(const Json& fields) {
  return {numbers_of(fields.at("verify")), numbers_of(fields.at("draft")),
          fields.at("outside").number()};
}

int equal(const std::string& what, double found, double expected) {
  return found == expected ? 0 : differs(what, shown(found), shown(expected));
}

int equal(const std::string& what, const std::vector<double>& found, const Json& expected) {
  const auto numbers = numbers_of(expected);
  int wrong = same(what + ", how many", found.size(), numbers.size());
  for (std::size_t i = 0; wrong == 0 && i < numbers.size(); ++i) {
    wrong += equal(what + " " + std::to_string(i), found[i], numbers[i]);
  }
  return wrong;
}

static int check_case(const std::string& name, const Json& fields) {
  const native::Costs costs = costs_of(fields);
  const native::Prices prices(costs.verify_ns, costs.draft_ns, costs.outside_ns);
  const std::vector<Token> landings(prices.landings.begin(), prices.landings.end());
  const auto plan =
      native::plan(prices, numbers_of(fields.at("chances")), numbers_of(fields.at("surest")),
                   fields.at("share").number(), fields.at("floor").number());
  return equal(name + ": total", prices.total, fields.at("total")) +
         same(name + ": landings", landings, tokens_of(fields.at("landings"))) +
         same(name + ": gamma", Token{plan.gamma}, fields.at("gamma").integer()) +
         equal(name + ": rate", plan.rate, fields.at("rate").number()) +
         equal(name + ": keep", plan.keep, fields.at("keep")) +
         equal(name + ": more", plan.more, fields.at("more"));
}

static int check_between(const Json& fields) {
  std::vector<std::pair<int, double>> measured;
  for (const Json& pair : fields.at("measured").items()) {
    measured.emplace_back(static_cast<int>(pair.items()[0].integer()), pair.items()[1].number());
  }
  const int most = static_cast<int>(fields.at("most").integer());
  return equal("costs between", native::costs_between(measured, most), fields.at("costs"));
}

int check_plan(const Json& vectors) {
  int wrong = 0, number = 0;
  for (const Json& fields : vectors.at("cases").items()) {
    wrong += check_case("plan " + std::to_string(number++), fields);
  }
  for (const Json& fields : vectors.at("between").items()) wrong += check_between(fields);
  return wrong;
}

static const Registered kRegistered("plan", check_plan);

}  // namespace specrt::checks
