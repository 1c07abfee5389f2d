// Norms and sums of rows in terms of a vector of 16 lanes. Included inside an anonymous namespace
// with tiles.hpp, which it brings.
#pragma once

#include "kernels/tiles.hpp"

// The root of a mean square, turned over: what a row is multiplied by.
inline float inverse_root(float squares, std::size_t count, float epsilon) {
  return 1.0F / __builtin_sqrtf(squares / static_cast<float>(count) + epsilon);
}

// Zhang and Sennrich 2019, arXiv:1910.07467, and Ba et al. 2016, arXiv:1607.06450. Sums run over
// a row in steps of 16, lane by lane, and over the lanes in one order.
template <class V>
void normalize_row(const Norm& norm, const float* x, std::size_t inputs, float* y) {
  const float* row = x;
  if (norm.residual != nullptr) {
    float* sum = norm.sum != nullptr ? norm.sum : y;
    for (std::size_t i = 0; i < inputs; i += kTile) {
      const auto residual = load_before<V>(norm.residual, i, inputs, 0);
      store_before<V>(sum, i, inputs, V::add(load_before<V>(x, i, inputs, 0), residual));
    }
    row = sum;
  }
  if (norm.is_centred) {
    auto sum = V::spread(0);
    for (std::size_t i = 0; i < inputs; i += kTile)
      sum = V::add(sum, load_before<V>(row, i, inputs, 0));
    const auto shift = V::spread(-(sum_of_lanes<V>(sum) / static_cast<float>(inputs)));
    for (std::size_t i = 0; i < inputs; i += kTile)
      store_before<V>(y, i, inputs, V::add(load_before<V>(row, i, inputs, 0), shift));
    row = y;
  }
  auto squares = V::spread(0);
  for (std::size_t i = 0; i < inputs; i += kTile) {
    const auto part = load_before<V>(row, i, inputs, 0);
    squares = V::fma(part, part, squares);
  }
  const auto inverse = V::spread(inverse_root(sum_of_lanes<V>(squares), inputs, norm.epsilon));
  for (std::size_t i = 0; i < inputs; i += kTile) {
    const auto scaled = V::mul(load_before<V>(row, i, inputs, 0), inverse);
    const auto weight = load_before<V>(norm.weight, i, inputs, 0);
    const auto result = norm.bias == nullptr
                            ? V::mul(scaled, weight)
                            : V::fma(scaled, weight, load_before<V>(norm.bias, i, inputs, 0));
    store_before<V>(y, i, inputs, result);
  }
}

template <class V>
void normalize_rows(const Norm& norm, const float* x, std::size_t rows, std::size_t inputs,
                    float* y) {
  Norm own = norm;
  for (std::size_t row = 0; row < rows; row++) {
    normalize_row<V>(own, x + row * inputs, inputs, y + row * inputs);
    if (own.residual != nullptr) own.residual += inputs;
    if (own.sum != nullptr) own.sum += inputs;
  }
}

template <class V>
void add_rows(const float* rows, const std::size_t* places, const float* weights, std::size_t count,
              std::size_t width, float* y) {
  for (std::size_t i = 0; i < width; i += kTile) {
    auto sum = V::spread(0);
    for (std::size_t part = 0; part < count; part++)
      sum = V::fma(load_before<V>(rows + places[part] * width, i, width, 0),
                   V::spread(weights[part]), sum);
    store_before<V>(y, i, width, sum);
  }
}
