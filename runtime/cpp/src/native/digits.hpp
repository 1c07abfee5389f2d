// Where a tokenizer parts a text at digits, before anything else.
#pragma once

#include <string>
#include <vector>

namespace specrt::native {

// Part a text before every number that follows white space. The tokenizer library looks across such
// a place, where tokenizers that part digits from the rest do not: the last of several spaces would
// go with the number.
std::vector<std::string> before_digits(const std::string& text);

}  // namespace specrt::native
