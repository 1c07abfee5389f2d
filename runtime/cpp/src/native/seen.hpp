// Which tokens a text holds, and how often.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "params.hpp"

namespace specrt::native {

// Tokens that follow one another, in somebody else's memory.
struct Span {
  const Token* first;
  std::size_t size;

  const Token* begin() const { return first; }
  const Token* end() const { return first + size; }
  Token operator[](std::size_t i) const { return first[i]; }
};

class Seen {
 public:
  struct Entry {
    Token token;
    std::uint32_t times;
  };

  void add(Span tokens);
  // The different tokens, in the order they came.
  const std::vector<Entry>& entries() const { return entries_; }
  std::uint32_t times(Token token) const;

 private:
  std::vector<Entry> entries_;
  std::unordered_map<Token, std::size_t> places_;
};

}  // namespace specrt::native
