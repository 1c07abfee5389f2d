// Functions of the native implementation by their names, which answer calls; both are JSON.
#pragma once

#include <initializer_list>

#include "json.hpp"
#include "params.hpp"

namespace specrt::checks {

using Function = std::string (*)(const Json& call);

// Makes functions known to main.cpp.
struct Registered {
  Registered(std::initializer_list<std::pair<const std::string, Function>> functions);
};

inline std::vector<Token> tokens_of(const Json& call, const char* name) {
  return get<std::vector<Token>>(call, name);
}

// Options by their names, as a request gives them.
Params params_of(const Json& options);

}  // namespace specrt::checks
