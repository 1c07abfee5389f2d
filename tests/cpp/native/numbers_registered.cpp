// Apart from the checks: the namespace specrt::check and the function specrt::check of params.hpp
// cannot be seen together.
#include "native/check.hpp"

namespace specrt::checks {

int check_noise(const native::Json& vectors);
int check_sampling(const native::Json& vectors);
int check_rules(const native::Json& vectors);
int check_verify(const native::Json& vectors);
int check_logprobs(const native::Json& vectors);

int differs(const std::string& what, const std::string& found, const std::string& expected) {
  return check::differs(what, found, expected);
}

static const check::Registered kRegistered[] = {{"noise", check_noise},
                                                {"sampling", check_sampling},
                                                {"rules", check_rules},
                                                {"verify", check_verify},
                                                {"logprobs", check_logprobs}};

}  // namespace specrt::checks
