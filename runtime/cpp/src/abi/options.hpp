// The options of a generation by name: the kind and the field of each.
#pragma once

#include <string>
#include <vector>

#include "params.hpp"

namespace specrt::abi {

enum class OptionKind { kInteger, kNumber, kText, kTexts, kTokens, kBias, kProcessors };

struct Option {
  const char* name;
  OptionKind kind;
  void (*clear)(Params&);
};

const std::vector<Option>& options();

// The option of a name; refuses one there is not.
const Option& option_named(const std::string& name);

bool has_option(const std::string& name, OptionKind kind);

// Refuse a name there is not, and an option of another kind; `gamma` is an integer and a text.
void require_option(const std::string& name, OptionKind kind);

}  // namespace specrt::abi
