#include "native/check.hpp"
#include "native/drafting.hpp"
#include "native/numbers.hpp"
#include "native/speculation/costs.hpp"

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

static int check_between(const Json& fields) {
  std::vector<std::pair<int, double>> measured;
  for (const Json& pair : fields.at("measured").items()) {
    measured.emplace_back(static_cast<int>(pair.items()[0].integer()), pair.items()[1].number());
  }
  const int most = static_cast<int>(fields.at("most").integer());
  return equal("costs between", native::costs_between(measured, most), fields.at("costs"));
}

static int check_costs(const Json& vectors) {
  int wrong = 0;
  for (const Json& fields : vectors.at("cases").items()) wrong += check_between(fields);
  return wrong;
}

static const Registered kRegistered("costs", check_costs);

}  // namespace specrt::checks
