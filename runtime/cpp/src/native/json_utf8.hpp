// UTF-8, a character at a time.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace specrt::native {

// One character: how many bytes it has, or how many to pass over where it is none.
struct Character {
  std::size_t bytes;
  bool valid;
};

Character character(std::string_view text, std::size_t at);
void append_utf8(std::string& text, unsigned code);

}  // namespace specrt::native
