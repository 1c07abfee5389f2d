// Texts that cross the interface: whether they are UTF-8, and how messages show them.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace specrt::abi {

// Where the first byte is that makes a text no UTF-8; npos where it is.
std::size_t invalid_utf8(std::string_view text);

// Copy a text of the application, or throw Failure(SPECRT_INVALID_ARGUMENT).
std::string checked_text(const char* name, const char* text, std::size_t bytes);
std::string checked_text(const char* name, const char* text);

// Return a text that a tokenizer is to read, or throw Failure(SPECRT_INVALID_ARGUMENT) for one with
// a zero byte: not every tokenizer library takes the length of a text.
std::string checked_words(const std::string& name, std::string text);

// Characters, of valid UTF-8.
std::size_t characters(std::string_view text);

// The most bytes up to `most` that end with a whole character.
std::size_t whole_prefix(std::string_view text, std::size_t most) noexcept;

// A text in quotes for a message: one line, and not longer than a line takes.
std::string quoted(std::string_view text);

// A number as people write it: the fewest digits that give it back.
std::string shown(double value);

}  // namespace specrt::abi
