// What a machine can do at most: loops of nothing but reads, and of nothing but multiply-adds.
// Included inside an anonymous namespace, like tiles.hpp.
#pragma once

#include "kernels/tiles.hpp"

// Read memory in four streams, which the processor fetches ahead by itself: no slower than by
// instructions, and up to 1.1 times as fast as one. `bytes` is a multiple of 256.
template <class V>
std::int32_t read_all(const std::uint8_t* from, std::size_t bytes) {
  constexpr std::size_t streams = 4;
  typename V::Ints most[streams];
  for (auto& lanes : most) lanes = V::fill(0);
  const std::size_t part = bytes / streams;
  for (std::size_t i = 0; i < part; i += kTile * sizeof(float))
    for (std::size_t s = 0; s < streams; s++) {
      const std::uint8_t* at = from + s * part + i;
      most[s] = V::most(most[s], V::magnitude(V::load(reinterpret_cast<const float*>(at))));
    }
  for (std::size_t s = 1; s < streams; s++) most[0] = V::most(most[0], most[s]);
  return V::total(most[0]);
}

// Multiply what is in registers: as many sums as fit, of some rows with some tiles, and a weight of
// each tile. The operands of rows are read. Returns the number of multiply-adds. Loops are
// unrolled: sums whose place is not known when it is compiled are kept in memory.
template <class V>
std::size_t multiply_only(Format format, std::size_t steps, float* result) {
  constexpr int rows = V::kQueries, tiles = V::kVectors;
  alignas(64) std::uint8_t bytes[tiles][kTile * kGroup] = {{1}};
  alignas(64) std::int8_t codes[rows][kGroup] = {{1}};
  alignas(64) float floats[tiles][kTile] = {{1}}, numbers[rows] = {1};
  alignas(64) float lanes[kTile];
  const bool in_codes = format == Format::int4 || format == Format::int8;
  if (in_codes) {
    typename V::Ints sums[rows * tiles];
#pragma GCC unroll 32
    for (int i = 0; i < rows * tiles; i++) sums[i] = V::fill(0);
    for (std::size_t step = 0; step < steps; step++) {
      __asm__ volatile("" : : "r"(codes), "r"(bytes) : "memory");  // what they hold is not known
#pragma GCC unroll 8                                               // or sums are in memory
      for (int t = 0; t < tiles; t++) {
        const auto weights = format == Format::int4 ? V::low_codes(bytes[t]) : V::codes(bytes[t]);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
          sums[r * tiles + t] = format == Format::int4
                                    ? V::dot_small(sums[r * tiles + t], weights, codes[r])
                                    : V::dot(sums[r * tiles + t], weights, codes[r]);
      }
    }
#pragma GCC unroll 32
    for (int i = 1; i < rows * tiles; i++) sums[0] = V::add_ints(sums[0], sums[i]);
    V::store(lanes, V::to_floats(sums[0]));
  } else {
    typename V::Floats sums[rows * tiles];
#pragma GCC unroll 32
    for (int i = 0; i < rows * tiles; i++) sums[i] = V::spread(0);
    for (std::size_t step = 0; step < steps; step++) {
      __asm__ volatile("" : : "r"(numbers), "r"(floats) : "memory");
#pragma GCC unroll 8
      for (int t = 0; t < tiles; t++) {
        const auto weights = V::load(floats[t]);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
          sums[r * tiles + t] = V::fma(weights, V::spread(numbers[r]), sums[r * tiles + t]);
      }
    }
#pragma GCC unroll 32
    for (int i = 1; i < rows * tiles; i++) sums[0] = V::add(sums[0], sums[i]);
    V::store(lanes, sums[0]);
  }
  *result = lanes[0];
  return steps * rows * tiles * kTile * (in_codes ? kGroup : 1);
}
