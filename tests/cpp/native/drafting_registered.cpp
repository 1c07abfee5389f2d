// Apart from the checks: the namespace specrt::check and the function specrt::check of params.hpp
// cannot be seen together.
#include "native/check.hpp"
#include "native/drafting.hpp"

namespace specrt::checks {

static const check::Registered kRegistered[] = {
    {"plan", check_plan}, {"gamma", check_gamma}, {"ngram", check_ngram}, {"draft", check_draft}};

}  // namespace specrt::checks
