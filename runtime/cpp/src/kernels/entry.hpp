// The kernels of one instruction set, made of its vector. Included inside an anonymous namespace,
// like tiles.hpp, which it brings with the rest.
#pragma once

#include "kernels/attention.hpp"
#include "kernels/limits.hpp"
#include "kernels/norms.hpp"
#include "kernels/recurrence.hpp"
#include "kernels/scores.hpp"

template <class V>
constexpr Kernels kernels_of(const char* name, bool (*supported)()) {
  return {name,         supported,        quantize_rows<V>, multiply_all<V>, multiply_all_floats<V>,
          append_token, attend_tokens<V>, prepare_step<V>,  recur_head<V>,   normalize_rows<V>,
          add_rows<V>,  score_row<V>,     read_all<V>,      multiply_only<V>};
}

// A kernel of another instruction set: a jump there, not its code a second time.
template <const Kernels& Other, auto Kernel>
struct Shared;
template <const Kernels& Other, class Result, class... Arguments,
          Result (*Kernels::*Kernel)(Arguments...)>
struct Shared<Other, Kernel> {
  static Result run(Arguments... arguments) { return (Other.*Kernel)(arguments...); }
};

// The kernels of one that differs from another in the products of codes alone.
template <const Kernels& Other>
constexpr Kernels kernels_over(
    const char* name, bool (*supported)(), decltype(Kernels::multiply) multiply,
    decltype(Kernels::multiply_only) multiply_only = Shared<Other, &Kernels::multiply_only>::run) {
  return {name,
          supported,
          Shared<Other, &Kernels::quantize>::run,
          multiply,
          Shared<Other, &Kernels::multiply_floats>::run,
          Shared<Other, &Kernels::append>::run,
          Shared<Other, &Kernels::attend>::run,
          Shared<Other, &Kernels::prepare>::run,
          Shared<Other, &Kernels::recur>::run,
          Shared<Other, &Kernels::normalize>::run,
          Shared<Other, &Kernels::add_rows>::run,
          Shared<Other, &Kernels::score>::run,
          Shared<Other, &Kernels::read>::run,
          multiply_only};
}
