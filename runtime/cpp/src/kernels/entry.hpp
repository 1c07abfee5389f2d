// The kernels of one instruction set, made of its vector. Included inside an anonymous namespace,
// like tiles.hpp, which it brings with the rest.
#pragma once

#include "kernels/attention.hpp"
#include "kernels/limits.hpp"
#include "kernels/norms.hpp"
#include "kernels/scores.hpp"

template <class V>
constexpr Kernels kernels_of(const char* name, bool (*supported)(),
                             decltype(Kernels::multiply) multiply = multiply_all<V>) {
  return {name,
          supported,
          quantize_rows<V>,
          multiply,
          multiply_all_floats<V>,
          append_token,
          attend_tokens<V>,
          normalize_rows<V>,
          score_row<V>,
          read_all<V>,
          multiply_only<V>};
}
