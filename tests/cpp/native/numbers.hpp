// What vectors hold, read and compared.
#pragma once

#include <string>
#include <vector>

#include "native/check.hpp"
#include "native/sampling/distribution.hpp"
#include "native/sampling/noise.hpp"
#include "native/text/json.hpp"

namespace specrt::checks {

// A number, or a text for one that JSON does not know: "inf", "-inf" or "nan".
double number_of(const native::Json& value);
// Whole numbers of 64 bits are texts.
std::uint64_t whole_of(const native::Json& value);
std::size_t size_of(const native::Json& value);
std::vector<double> numbers_of(const native::Json& values);
std::vector<Token> tokens_of(const native::Json& values);
std::vector<int> ints_of(const native::Json& values);
std::vector<std::string> texts_of(const native::Json& values);
// A number that looks random; the same as in sampling.py.
std::uint64_t mix(std::uint64_t x);

// A row of scores: written out, or made from a few numbers.
std::vector<float> row_of(const native::Json& row);
Params params_of(const native::Json& fields);
native::Distribution distribution_of(const native::Json& fields);
native::Noise noise_of(const native::Json& fields);

// Equal but for what rounding comes to.
bool near(double found, double expected);

std::string shown(double number);
std::string shown(const std::vector<Token>& ids);
// Print what differs; return how much did, 0 or 1.
int same(const std::string& what, std::uint64_t found, std::uint64_t expected);
int same(const std::string& what, Token found, Token expected);
int same(const std::string& what, const std::vector<Token>& found,
         const std::vector<Token>& expected);
int same(const std::string& what, const std::string& found, const std::string& expected);
int close(const std::string& what, double found, double expected);

}  // namespace specrt::checks
