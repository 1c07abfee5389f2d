// The options of a generation by name: kind, range, and the field of each.
#pragma once

#include <string>
#include <vector>

#include "params.hpp"

namespace specrt::abi {

enum class OptionKind { kInteger, kNumber, kText, kTexts, kTokens, kBias, kProcessors };

struct Option {
  const char* name;
  OptionKind kind;
};

const std::vector<Option>& options();

bool has_option(const std::string& name, OptionKind kind);

// Refuse a name there is not, and an option of another kind; `gamma` is an integer and a text.
void require_option(const std::string& name, OptionKind kind);

}  // namespace specrt::abi
