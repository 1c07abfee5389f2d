// The gammas that a policy kept to built ones chooses.
#include <memory>

#include "native/check.hpp"
#include "native/numbers.hpp"
#include "native/speculation/gamma.hpp"

namespace specrt::checks {

static int check_built(const native::Json& vectors) {
  int wrong = 0;
  for (const native::Json& fields : vectors.at("cases").items()) {
    std::vector<int> gammas;
    for (const Token gamma : tokens_of(fields.at("gammas"))) {
      gammas.push_back(static_cast<int>(gamma));
    }
    int most = 0;
    for (const Token expected : tokens_of(fields.at("chosen"))) {
      native::BuiltGamma policy(std::make_shared<native::FixedGamma>(most), gammas);
      wrong += same("of " + std::to_string(most++), Token{policy.choose()}, expected);
    }
  }
  return wrong;
}

static const Registered kBuilt("built", check_built);

}  // namespace specrt::checks
