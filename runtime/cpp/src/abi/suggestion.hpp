// The nearest known word for one that is not.
#pragma once

#include <string>
#include <vector>

namespace specrt::abi {

// "; did you mean 'x'?" for the nearest known word, or the list of them.
std::string did_you_mean(const std::string& word, std::vector<std::string> known);

}  // namespace specrt::abi
