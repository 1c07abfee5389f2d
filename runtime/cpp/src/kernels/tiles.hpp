// Products in terms of a vector of 16 lanes, `V`, which each instruction set brings its own of.
//
// Included inside an anonymous namespace by one file for each instruction set, after the pragma
// that turns it on. Nothing here may call an inline function of the standard library: the linker
// would keep one copy of it, perhaps one with instructions that this processor lacks.
#pragma once

template <class V>
typename V::Floats exponential(typename V::Floats x) {
  // Cody and Waite's reduction, and a polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2].
  x = V::at_most(V::at_least(x, V::spread(-87.0F)), V::spread(88.0F));
  const auto whole = V::round(V::mul(x, V::spread(1.44269504F)));
  const auto power = V::to_floats(whole);
  auto rest = V::fma(power, V::spread(-0.693359375F), x);
  rest = V::fma(power, V::spread(2.12194440e-4F), rest);
  auto sum = V::spread(1.38888889e-3F);
  constexpr float kFactors[] = {8.33333333e-3F, 4.16666667e-2F, 1.66666667e-1F, 0.5F, 1.0F, 1.0F};
  for (const float factor : kFactors) sum = V::fma(sum, rest, V::spread(factor));
  return V::mul(sum, V::power_of_two(whole));
}

// The sum of 16 lanes, in one order: 8 and 8, 4 and 4, 2 and 2, 1 and 1.
template <class V>
float sum_of_lanes(typename V::Floats value) {
  alignas(64) float lanes[kTile];
  V::store(lanes, value);
  for (std::size_t half = kTile / 2; half > 0; half /= 2)
    for (std::size_t i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}

template <class V>
float largest_of_lanes(typename V::Floats value) {
  alignas(64) float lanes[kTile];
  V::store(lanes, value);
  float most = lanes[0];
  for (const float lane : lanes) most = lane > most ? lane : most;
  return most;
}

// Load or store up to 16 floats: those before `end`. What is not there is loaded as `rest`.
template <class V>
typename V::Floats load_before(const float* from, std::size_t i, std::size_t end, float rest) {
  if (i + kTile <= end) return V::load(from + i);
  alignas(64) float lanes[kTile];
  for (std::size_t lane = 0; lane < kTile; lane++)
    lanes[lane] = i + lane < end ? from[i + lane] : rest;
  return V::load(lanes);
}

template <class V>
void store_before(float* to, std::size_t i, std::size_t end, typename V::Floats value) {
  if (i + kTile <= end) return V::store(to + i, value);
  alignas(64) float lanes[kTile];
  V::store(lanes, value);
  for (std::size_t lane = 0; i + lane < end; lane++) to[i + lane] = lanes[lane];
}

// x * sigmoid(scaled), the form of both activations.
template <class V>
typename V::Floats activate(typename V::Floats x, Activation activation) {
  auto scaled = x;
  if (activation == Activation::gelu) {  // by tanh, as sigmoid of twice the argument
    const auto cubed = V::mul(V::mul(x, x), x);
    scaled = V::mul(V::fma(cubed, V::spread(0.044715F), x), V::spread(1.59576912F));
  }
  const auto decay = exponential<V>(V::mul(scaled, V::spread(-1.0F)));
  return V::divide(x, V::add(decay, V::spread(1.0F)));
}

template <class V>
void write(const Weights& weights, const Output& output, std::size_t row, std::size_t tile,
           typename V::Floats sum) {
  const bool paired = output.activation != Activation::none;
  const std::size_t outputs = paired ? weights.outputs / 2 : weights.outputs;
  const std::size_t column = (paired ? tile / 2 : tile) * kTile;
  store_before<V>(output.y + row * output.stride, column, outputs, sum);
}

template <class V, int R, int T>
void finish(const Weights& weights, const Output& output, std::size_t row, std::size_t tile,
            typename V::Floats (&sums)[T][R]) {
  if (output.bias != nullptr)
    for (int t = 0; t < T; t++) {
      const auto bias = V::load(output.bias + (tile + t) * kTile);
      for (int r = 0; r < R; r++) sums[t][r] = V::add(sums[t][r], bias);
    }
  if (output.activation == Activation::none) {
    for (int t = 0; t < T; t++)
      for (int r = 0; r < R; r++) write<V>(weights, output, row + r, tile + t, sums[t][r]);
  } else if constexpr (T % 2 == 0) {
    for (int t = 0; t < T; t += 2)
      for (int r = 0; r < R; r++) {
        const auto gate = activate<V>(sums[t][r], output.activation);
        write<V>(weights, output, row + r, tile + t, V::mul(gate, sums[t + 1][r]));
      }
  }
}

template <class V, Format F>
typename V::Floats load_weights(const std::uint8_t* values) {
  if constexpr (F == Format::fp32) return V::load(reinterpret_cast<const float*>(values));
  if constexpr (F == Format::fp16)
    return V::load_fp16(reinterpret_cast<const std::uint16_t*>(values));
  if constexpr (F == Format::bf16)
    return V::load_bf16(reinterpret_cast<const std::uint16_t*>(values));
}

// Bytes from where a tile is read to what is fetched ahead: in the same tile, and at its end T
// tiles on, because those between are read beside it.
template <class V, int T>
std::size_t bytes_ahead(std::size_t at, std::size_t tile_bytes) {
  return V::kAhead + (at + V::kAhead < tile_bytes ? 0 : (T - 1) * tile_bytes);
}

// R rows with T tiles of codes.
template <class V, int Bits, int R, int T>
void multiply_codes(const Weights& weights, const QuantizedRows& x, std::size_t row,
                    std::size_t tile, const Output& output) {
  constexpr std::size_t step = Bits == 8 ? kGroup : 2 * kGroup;  // inputs of 64 bytes
  const std::size_t inputs = weights.inputs, block = weights.block, blocks = inputs / block;
  const std::size_t tile_bytes = inputs / step * 64;
  const std::uint8_t* values = weights.values + tile * tile_bytes;
  const std::size_t scale_bytes = weights.scale_bytes;
  const std::uint8_t* scales = weights.scales + tile * blocks * kTile * scale_bytes;
  const std::int8_t* codes = x.codes + row * inputs;
  const float* row_scales = x.scales + row * blocks;
  const std::int32_t* row_sums = x.sums + row * blocks;
  typename V::Floats sums[T][R];
  for (int t = 0; t < T; t++)
    for (int r = 0; r < R; r++) sums[t][r] = V::spread(0);
  for (std::size_t b = 0; b < blocks; b++) {
    typename V::Ints whole[T][R];
    for (int r = 0; r < R; r++) {
      const auto begin = V::fill(-V::template zero<Bits>() * row_sums[r * blocks + b]);
      for (int t = 0; t < T; t++) whole[t][r] = begin;
    }
    const std::size_t ahead = bytes_ahead<V, T>(b * block / step * 64, tile_bytes);
    for (std::size_t k = 0; k < block; k += step) {
      for (int t = 0; t < T; t++) {
        const std::uint8_t* at = values + t * tile_bytes;
        V::prefetch(at + ahead);
        if constexpr (Bits == 8) {
          const auto part = V::codes(at);
          for (int r = 0; r < R; r++)
            whole[t][r] = V::dot(whole[t][r], part, codes + r * inputs + k);
        } else {
          const auto low = V::low_codes(at), high = V::high_codes(at);
          for (int r = 0; r < R; r++) {
            whole[t][r] = V::dot_small(whole[t][r], low, codes + r * inputs + k);
            whole[t][r] = V::dot_small(whole[t][r], high, codes + r * inputs + k + kGroup);
          }
        }
      }
      values += 64;
    }
    codes += block;
    for (int t = 0; t < T; t++) {
      const std::uint8_t* at = scales + (t * blocks + b) * kTile * scale_bytes;
      const auto scale =
          scale_bytes == 2 ? load_weights<V, Format::fp16>(at) : load_weights<V, Format::fp32>(at);
      for (int r = 0; r < R; r++) {
        const auto both = V::mul(scale, V::spread(row_scales[r * blocks + b]));
        sums[t][r] = V::fma(V::to_floats(whole[t][r]), both, sums[t][r]);
      }
    }
  }
  finish<V, R, T>(weights, output, row, tile, sums);
}

// R rows with T tiles of floats.
template <class V, Format F, int R, int T>
void multiply_floats(const Weights& weights, const float* x, std::size_t row, std::size_t tile,
                     const Output& output) {
  constexpr std::size_t bytes = F == Format::fp32 ? 4 : 2;
  const std::size_t inputs = weights.inputs, tile_bytes = inputs * kTile * bytes;
  const std::uint8_t* values = weights.values + tile * tile_bytes;
  x += row * inputs;
  typename V::Floats sums[T][R];
  for (int t = 0; t < T; t++)
    for (int r = 0; r < R; r++) sums[t][r] = V::spread(0);
  for (std::size_t k = 0; k < inputs; k++) {
    const std::size_t ahead = bytes_ahead<V, T>(k * kTile * bytes, tile_bytes);
    for (int t = 0; t < T; t++) {
      const std::uint8_t* at = values + t * tile_bytes;
      V::prefetch(at + ahead);
      const auto part = load_weights<V, F>(at);
      for (int r = 0; r < R; r++)
        sums[t][r] = V::fma(part, V::spread(x[r * inputs + k]), sums[t][r]);
    }
    values += kTile * bytes;
  }
  finish<V, R, T>(weights, output, row, tile, sums);
}

template <int N>
struct Constant {
  static constexpr int value = N;
};

// Call `body` with numbers of rows and tiles that are known when it is compiled.
template <int R, int T, class Body>
void with_tiles(std::size_t tiles, const Body& body) {
  if constexpr (T > 1)
    if (tiles < T) return with_tiles<R, T / 2>(tiles, body);
  body(Constant<R>{}, Constant<T>{});
}

template <class V, bool Codes, int R, class Body>
void with_shape(std::size_t rows, std::size_t tiles, const Body& body) {
  if constexpr (R > 1)
    if (rows < R) return with_shape<V, Codes, R - 1>(rows, tiles, body);
  constexpr int most = V::tiles(Codes, R);
  with_tiles<R, (most < 2 ? 2 : most)>(tiles, body);  // gate and up are two
}

// Run `body(R, T, row, tile)` over all rows and tiles. For some tiles all rows are run, so that
// their weights come from memory once, and from the first caches afterwards.
template <class V, bool Codes, class Body>
void for_tiles(std::size_t rows, std::size_t first, std::size_t last, bool paired,
               const Body& body) {
  if (rows == 0) return;
  const std::size_t most = V::rows(Codes, paired, rows), parts = (rows + most - 1) / most;
  const std::size_t least = paired ? 2 : 1, asked = V::tiles(Codes, (rows + parts - 1) / parts);
  for (std::size_t tile = first; tile < last;) {
    std::size_t tiles = asked < least ? least : asked;
    while (tiles > last - tile) tiles /= 2;
    for (std::size_t row = 0, part = 0; part < parts; part++) {
      const std::size_t left = parts - part;
      const std::size_t count = (rows - row + left - 1) / left;  // 7 rows are 4 and 3, not 6 and 1
      with_shape<V, Codes, V::kRows>(count, tiles, [&](auto r, auto t) { body(r, t, row, tile); });
      row += count;
    }
    tile += tiles;
  }
}

template <class V, int Bits>
void multiply_bits(const Weights& weights, const QuantizedRows& x, std::size_t rows,
                   std::size_t first, std::size_t last, const Output& output) {
  for_tiles<V, true>(rows, first, last, output.activation != Activation::none,
                     [&](auto r, auto t, std::size_t row, std::size_t tile) {
                       multiply_codes<V, Bits, r.value, t.value>(weights, x, row, tile, output);
                     });
}

template <class V, Format F>
void multiply_format(const Weights& weights, const float* x, std::size_t rows, std::size_t first,
                     std::size_t last, const Output& output) {
  for_tiles<V, false>(rows, first, last, output.activation != Activation::none,
                      [&](auto r, auto t, std::size_t row, std::size_t tile) {
                        multiply_floats<V, F, r.value, t.value>(weights, x, row, tile, output);
                      });
}

template <class V>
void multiply_all(const Weights& weights, const QuantizedRows& x, std::size_t rows,
                  std::size_t first, std::size_t last, const Output& output) {
  if (weights.format == Format::int4)
    multiply_bits<V, 4>(weights, x, rows, first, last, output);
  else
    multiply_bits<V, 8>(weights, x, rows, first, last, output);
}

template <class V>
void multiply_all_floats(const Weights& weights, const float* x, std::size_t rows,
                         std::size_t first, std::size_t last, const Output& output) {
  if (weights.format == Format::bf16)
    multiply_format<V, Format::bf16>(weights, x, rows, first, last, output);
  else if (weights.format == Format::fp16)
    multiply_format<V, Format::fp16>(weights, x, rows, first, last, output);
  else
    multiply_format<V, Format::fp32>(weights, x, rows, first, last, output);
}

// Below this a block is zeros: 127 / largest would overflow.
constexpr float kLeast = 1e-30F;

template <class V>
void quantize_rows(const float* x, std::size_t rows, std::size_t inputs, std::size_t block,
                   const QuantizedRows& result) {
  const std::size_t blocks = rows * (inputs / block);
  for (std::size_t b = 0; b < blocks; b++) {
    const float* from = x + b * block;
    // Of the bits without sign: as whole numbers, what is no number is largest.
    auto most = V::fill(0);
    for (std::size_t i = 0; i < block; i += kTile)
      most = V::most(most, V::magnitude(V::load(from + i)));
    const float largest = V::largest(most);
    const float inverse = largest >= kLeast ? 127.0F / largest : 0.0F;
    auto sum = V::fill(0);
    for (std::size_t i = 0; i < block; i += kTile) {
      const auto code = V::clamp_code(V::round(V::mul(V::load(from + i), V::spread(inverse))));
      sum = V::add_ints(sum, code);
      V::store_codes(result.codes + b * block + i, code);
    }
    result.scales[b] = largest >= kLeast || largest != largest ? largest / 127.0F : 0.0F;
    result.sums[b] = V::total(sum);
  }
}
