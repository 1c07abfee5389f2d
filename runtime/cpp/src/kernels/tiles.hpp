// Products in terms of a vector of 16 lanes, `V`, which each instruction set brings its own of.
//
// Included inside an anonymous namespace by one file for each instruction set, after the pragma
// that turns it on. Nothing here may call an inline function of the standard library: the linker
// would keep one copy of it, perhaps one with instructions that this processor lacks.
#pragma once

// exp of N vectors, step by step for all of them: one alone waits for its last step most of the
// time.
template <class V, int N>
void exponentials(typename V::Floats (&x)[N]) {
  // Cody and Waite's reduction, and a polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2].
  typename V::Ints whole[N];
  typename V::Floats sums[N];
  for (int n = 0; n < N; n++)
    x[n] = V::at_most(V::at_least(x[n], V::spread(-87.0F)), V::spread(88.0F));
  for (int n = 0; n < N; n++) whole[n] = V::round(V::mul(x[n], V::spread(1.44269504F)));
  for (int n = 0; n < N; n++) x[n] = V::fma(V::to_floats(whole[n]), V::spread(-0.693359375F), x[n]);
  for (int n = 0; n < N; n++)
    x[n] = V::fma(V::to_floats(whole[n]), V::spread(2.12194440e-4F), x[n]);
  for (int n = 0; n < N; n++) sums[n] = V::spread(1.38888889e-3F);
  constexpr float kFactors[] = {8.33333333e-3F, 4.16666667e-2F, 1.66666667e-1F, 0.5F, 1.0F, 1.0F};
  for (const float factor : kFactors)
    for (int n = 0; n < N; n++) sums[n] = V::fma(sums[n], x[n], V::spread(factor));
  for (int n = 0; n < N; n++) x[n] = V::mul(sums[n], V::power_of_two(whole[n]));
}

template <class V>
typename V::Floats exponential(typename V::Floats x) {
  typename V::Floats one[] = {x};
  exponentials<V>(one);
  return one[0];
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

// Write what some rows come to with tiles from `tile` to `end`; `sums` are [rows][kStrip] vectors.
template <class V>
void finish(const Weights& weights, const Output& output, std::size_t row, std::size_t rows,
            std::size_t tile, std::size_t end, const float* sums) {
  const bool paired = output.activation != Activation::none;
  for (; tile < end; tile += paired ? 2 : 1, sums += (paired ? 2 : 1) * kTile)
    for (std::size_t r = 0; r < rows; r++) {
      typename V::Floats one[2];
      for (std::size_t i = 0; i < (paired ? 2 : 1); i++) {
        one[i] = V::load(sums + (r * kStrip + i) * kTile);
        if (output.bias != nullptr)
          one[i] = V::add(one[i], V::load(output.bias + (tile + i) * kTile));
      }
      if (paired) one[0] = V::mul(activate<V>(one[0], output.activation), one[1]);
      write<V>(weights, output, row + r, tile, one[0]);
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

template <class V>
typename V::Floats load_scales(const Weights& weights, const std::uint8_t* scales) {
  return weights.scale_bytes == 2 ? load_weights<V, Format::fp16>(scales)
                                  : load_weights<V, Format::fp32>(scales);
}

// What sums of bytes as `V` has them are more than those of the bytes as they lie, for each unit of
// a row: V takes half their range off where its instructions want a sign.
template <class V, Format F>
constexpr std::int32_t taken_off() {
  return F == Format::int8 ? 128 - V::template zero<8>() : 8 - V::template zero<4>();
}

// Blocks of so many inputs have sums of rows that 16 bits hold.
constexpr std::size_t kShortBlock = 256;

// Where the sum of a block begins, for zeros of 16 outputs below 0 and the sum of a row in all
// lanes.
template <class V, Format F>
typename V::Ints begin_with(typename V::Ints zeros, typename V::Ints sum, bool is_short) {
  const auto begin = is_short ? V::times_short(zeros, sum) : V::times(zeros, sum);
  if constexpr (taken_off<V, F>() == 0)
    return begin;
  else
    return V::add_ints(begin, V::times(V::fill(taken_off<V, F>()), sum));
}

// The same where all outputs have one zero.
template <class V, Format F>
constexpr std::int32_t begin_with(Offset offset, std::int32_t sum) {
  if (F == Format::fp4) return -kMiddle * sum;
  const std::int32_t half = F == Format::int8 ? 128 : 8;
  return (taken_off<V, F>() - (offset == Offset::minimums ? 0 : half)) * sum;
}

// What some rows multiply some tiles with, and what they fetch: where a strip is read more than
// once, each reading fetches its share of what comes next.
struct Chunk {
  std::size_t row, tile;
  std::size_t begin, end;    // blocks of codes, inputs of floats
  const std::uint8_t* next;  // fetched while this is read
  std::size_t readings;
  float* sums;  // [rows][kStrip] vectors
};

// How far ahead of what is fetched its page is found. To find one that the core has no entry of
// takes as long as to read memory, and nothing is fetched meanwhile.
constexpr std::size_t kPageAhead = 16384;
// Inputs of floats between two times of fetching.
constexpr std::size_t kPiece = 8;

template <class V>
void fetch(const std::uint8_t* next, std::size_t bytes) {
  V::prefetch(next + kPageAhead);
  for (std::size_t i = 0; i < bytes; i += 64) V::prefetch(next + i);
}

template <int N>
struct Constant {
  static constexpr int value = N;
};

// 16 outputs' codes of 4 inputs: of a step, or of one of its halves.
template <class V, Format F>
auto load_codes(const std::uint8_t* from, bool is_high) {
  if constexpr (F == Format::int8)
    return V::codes(from);
  else if constexpr (F == Format::fp4)
    return is_high ? V::high_values(from) : V::low_values(from);
  else
    return is_high ? V::high_codes(from) : V::low_codes(from);
}

// Add to the sums of R rows with T tiles of codes. Not inline, as sums of many shapes in one
// function end up in memory: 0.8 of the speed. So do those of loops that GCC 12 does not unroll.
template <class V, Format F, Offset O, int R, int T>
__attribute__((noinline)) void multiply_codes(const Weights& weights, const QuantizedRows& x,
                                              const Chunk& chunk) {
  constexpr int Bits = F == Format::int8 ? 8 : 4;
  constexpr std::size_t step = Bits == 8 ? kGroup : 2 * kGroup;  // inputs of 64 bytes
  const std::size_t inputs = weights.inputs, block = weights.block, blocks = inputs / block;
  const std::size_t strip = weights.strip_tiles(chunk.tile), side = chunk.tile % kStrip;
  const std::size_t tile_scales = kTile * weights.scale_bytes;
  const std::size_t fetched = strip * 64 / chunk.readings;
  const std::uint8_t* values =
      weights.values + weights.strip_values(chunk.tile, chunk.begin * block) + side * 64;
  // Zeros of two blocks of int4 lie after the first one; no chunk begins with the second.
  constexpr bool are_halves = O == Offset::zeros && Bits == 4;
  const std::size_t beside[] = {strip * (tile_scales + weights.offset_bytes(0)),
                                strip * (tile_scales + weights.offset_bytes(1))};
  const std::size_t fetched_beside[] = {beside[0] / chunk.readings, beside[1] / chunk.readings};
  const std::uint8_t *next = chunk.next, *zeros = nullptr;
  const std::int8_t* codes = x.codes + chunk.row * inputs + chunk.begin * block;
  typename V::Floats sums[T][R];
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sums[t][r] = V::load(chunk.sums + (r * kStrip + t) * kTile);
  const auto multiply_block = [&](std::size_t b, auto which) __attribute__((always_inline)) {
    constexpr bool is_second = which.value != 0;
    const std::size_t tile_offsets = O == Offset::none ? 0 : weights.offset_bytes(is_second);
    typename V::Ints whole[T][R];
    if constexpr (O != Offset::zeros) {
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const std::int32_t sum = x.sums[(chunk.row + r) * blocks + b];
        const auto begin = V::fill(begin_with<V, F>(O, sum));
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) whole[t][r] = begin;
      }
    } else {
      if constexpr (!is_second)
        zeros = values + strip * (block / step * 64 + tile_scales) - side * (64 - kTile);
      typename V::Ints totals[R];
      for (int r = 0; r < R; r++) totals[r] = V::fill(x.sums[(chunk.row + r) * blocks + b]);
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) {
        const auto some = V::template zeros<Bits, is_second>(zeros + t * kTile);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
          whole[t][r] = begin_with<V, F>(some, totals[r], block <= kShortBlock);
      }
    }
    constexpr int together = R > 4 ? T : 1;  // tiles that an operand of a row is read for
    for (std::size_t k = 0; k < block; k += step) {
#pragma GCC unroll 8
      for (int first = 0; first < T; first += together) {
        for (int t = first; t < first + together; t++) V::prefetch(next + t * 64);
#pragma GCC unroll 2
        for (std::size_t i = 0; i < step; i += kGroup) {
          decltype(load_codes<V, F>(values, false)) parts[together];
#pragma GCC unroll 8
          for (int t = 0; t < together; t++)
            parts[t] = load_codes<V, F>(values + (first + t) * 64, i > 0);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) {
            const std::int8_t* four = codes + r * inputs + k + i;
#pragma GCC unroll 8
            for (int t = 0; t < together; t++) {
              auto& sum = whole[first + t][r];
              if constexpr (Bits == 8)
                sum = V::dot(sum, parts[t], four);
              else
                sum = V::dot_small(sum, parts[t], four);
            }
          }
        }
      }
      values += strip * 64;
      next += fetched;
    }
    codes += block;
    const std::uint8_t* scales = values - side * 64 + side * tile_scales;
#pragma GCC unroll 8
    for (int t = 0; t < T; t++, scales += tile_scales) {
      V::prefetch(next + t * tile_scales);
      const auto scale = load_scales<V>(weights, scales);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const auto both = V::mul(scale, V::spread(x.scales[(chunk.row + r) * blocks + b]));
        sums[t][r] = V::fma(V::to_floats(whole[t][r]), both, sums[t][r]);
      }
    }
    if constexpr (O == Offset::zeros && !is_second) fetch<V>(next + T * tile_scales, T * kTile);
    if constexpr (O == Offset::minimums) {
      const std::uint8_t* offsets = values + strip * tile_scales - side * 64 + side * tile_offsets;
      fetch<V>(next + T * tile_scales, T * tile_offsets);
#pragma GCC unroll 8
      for (int t = 0; t < T; t++, offsets += tile_offsets) {
        const auto minimum = load_scales<V>(weights, offsets);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
          sums[t][r] =
              V::fma(minimum, V::spread(x.totals[(chunk.row + r) * blocks + b]), sums[t][r]);
      }
    }
    values += beside[is_second];
    next += fetched_beside[is_second];
    V::prefetch(next + kPageAhead);  // before the sums it makes GCC 12 spill
  };
  for (std::size_t b = chunk.begin; b < chunk.end; b++) {
    multiply_block(b, Constant<0>{});
    if constexpr (are_halves)
      if (++b < chunk.end) multiply_block(b, Constant<1>{});
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) V::store(chunk.sums + (r * kStrip + t) * kTile, sums[t][r]);
}

// The same with fp8, whose sums of a block are those of floats.
template <class V, int R, int T>
__attribute__((noinline)) void multiply_fp8(const Weights& weights, const float* x,
                                            const Chunk& chunk) {
  const std::size_t inputs = weights.inputs, block = weights.block;
  const std::size_t strip = weights.strip_tiles(chunk.tile), side = chunk.tile % kStrip;
  const std::size_t tile_scales = kTile * weights.scale_bytes;
  const std::size_t fetched = kPiece * strip * kTile / chunk.readings;
  const std::uint8_t* values =
      weights.values + weights.strip_values(chunk.tile, chunk.begin * block);
  const std::uint8_t* next = chunk.next;
  x += chunk.row * inputs + chunk.begin * block;
  for (std::size_t b = chunk.begin; b < chunk.end; b++) {
    typename V::Floats sums[T][R];
    for (int t = 0; t < T; t++)
      for (int r = 0; r < R; r++) sums[t][r] = V::spread(0);
    for (std::size_t k = 0; k < block; k++) {
      if (k % kPiece == 0) {
        fetch<V>(next, fetched);
        next += fetched;
      }
      for (int t = 0; t < T; t++) {
        const auto part = V::load_fp8(values + (side + t) * kTile);
        for (int r = 0; r < R; r++)
          sums[t][r] = V::fma(part, V::spread(x[r * inputs + k]), sums[t][r]);
      }
      values += strip * kTile;
    }
    for (int t = 0; t < T; t++) {
      const auto stored = load_scales<V>(weights, values + (side + t) * tile_scales);
      const auto scale = V::mul(stored, V::spread(kFp8Raised));
      for (int r = 0; r < R; r++) {
        float* to = chunk.sums + (r * kStrip + t) * kTile;
        V::store(to, V::fma(sums[t][r], scale, V::load(to)));
      }
    }
    x += block;
    values += strip * tile_scales;
    next += strip * tile_scales / chunk.readings;
  }
}

// The same with floats.
template <class V, Format F, int R, int T>
__attribute__((noinline)) void multiply_floats(const Weights& weights, const float* x,
                                               const Chunk& chunk) {
  constexpr std::size_t bytes = kTile * (F == Format::fp32 ? 4 : 2);
  const std::size_t inputs = weights.inputs, strip = weights.strip_tiles(chunk.tile);
  const std::size_t fetched = kPiece * strip * bytes / chunk.readings;
  const std::uint8_t* values =
      weights.values + weights.strip_values(chunk.tile, chunk.begin) + chunk.tile % kStrip * bytes;
  const std::uint8_t* next = chunk.next;
  x += chunk.row * inputs;
  typename V::Floats sums[T][R];
  for (int t = 0; t < T; t++)
    for (int r = 0; r < R; r++) sums[t][r] = V::load(chunk.sums + (r * kStrip + t) * kTile);
  for (std::size_t k = chunk.begin; k < chunk.end;) {
    fetch<V>(next, fetched);
    next += fetched;
    const std::size_t end = chunk.end - k < kPiece ? chunk.end : k + kPiece;
    for (; k < end; k++) {
      for (int t = 0; t < T; t++) {
        const auto part = load_weights<V, F>(values + t * bytes);
        for (int r = 0; r < R; r++)
          sums[t][r] = V::fma(part, V::spread(x[r * inputs + k]), sums[t][r]);
      }
      values += strip * bytes;
    }
  }
  for (int t = 0; t < T; t++)
    for (int r = 0; r < R; r++) V::store(chunk.sums + (r * kStrip + t) * kTile, sums[t][r]);
}

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
  with_tiles<R, V::tiles(Codes, R)>(tiles, body);
}

// Rows that are multiplied with a strip before the next ones: their sums lie in the first cache.
constexpr std::size_t kPanelRows = 32;
// Bytes of a strip of int8 that up to some rows read again from the first cache. Those of the next
// ones are fetched next to them. Other formats and more rows take longer to multiply than the
// second cache to read, and to begin chunks takes a tenth.
constexpr std::size_t kChunkBytes = 17 << 10, kChunkRows = 16;

// Run `body(R, T, chunk)` over all rows and tiles, and over `steps` of the inputs. A strip comes
// from memory once: where registers do not hold all rows with all its tiles, it is read again from
// a cache.
template <class V, bool Codes, class Body>
void for_chunks(const Weights& weights, std::size_t rows, std::size_t first, std::size_t last,
                std::size_t steps, const Output& output, const Body& body) {
  alignas(64) float sums[kPanelRows * kStrip * kTile];
  const std::size_t step_inputs = weights.inputs / steps;
  for (std::size_t tile = first, end; tile < last; tile = end) {
    end = tile - tile % kStrip + kStrip;
    end = end < last ? end : last;
    const std::size_t step_bytes = weights.tile_bytes() / steps * weights.strip_tiles(tile);
    for (std::size_t row = 0; row < rows; row += kPanelRows) {
      const std::size_t count = rows - row < kPanelRows ? rows - row : kPanelRows;
      const std::size_t most = V::rows(Codes, count), parts = (count + most - 1) / most;
      const std::size_t asked = V::tiles(Codes, (count + parts - 1) / parts);
      const std::size_t readings = parts * ((end - tile + asked - 1) / asked);
      const std::size_t some = step_bytes < kChunkBytes ? kChunkBytes / step_bytes : 1;
      const bool is_cut = readings > 1 && weights.format == Format::int8 && rows <= kChunkRows;
      const std::size_t taken = is_cut ? some : steps;
      for (std::size_t i = 0; i < count * kStrip; i++) V::store(sums + i * kTile, V::spread(0));
      for (std::size_t begin = 0; begin < steps; begin += taken) {
        const std::size_t stop = begin + taken < steps ? begin + taken : steps;
        const std::size_t ahead = readings > 1 ? (stop - begin) * step_bytes : V::kAhead;
        const std::uint8_t* at =
            weights.values + weights.strip_values(tile, begin * step_inputs) + ahead;
        std::size_t reading = 0;
        for (std::size_t t = tile, tiles; t < end; t += tiles) {
          for (tiles = asked; tiles > end - t;) tiles /= 2;
          for (std::size_t r = 0, part = 0, some_rows; part < parts; part++, r += some_rows) {
            some_rows = (count - r + parts - part - 1) / (parts - part);  // 7 are 4 and 3
            const Chunk chunk{row + r,
                              t,
                              begin,
                              stop,
                              at + reading * ahead / readings,
                              readings,
                              sums + (r * kStrip + t - tile) * kTile};
            with_shape<V, Codes, V::kRows>(some_rows, tiles,
                                           [&](auto R, auto T) { body(R, T, chunk); });
            reading += readings > 1;
          }
        }
      }
      finish<V>(weights, output, row, count, tile, end, sums);
    }
  }
}

template <class V, Format F, Offset O>
void multiply_bits(const Weights& weights, const QuantizedRows& x, std::size_t rows,
                   std::size_t first, std::size_t last, const Output& output) {
  for_chunks<V, true>(weights, rows, first, last, weights.inputs / weights.block, output,
                      [&](auto r, auto t, const Chunk& chunk) {
                        multiply_codes<V, F, O, r.value, t.value>(weights, x, chunk);
                      });
}

template <class V, Format F>
void multiply_format(const Weights& weights, const float* x, std::size_t rows, std::size_t first,
                     std::size_t last, const Output& output) {
  for_chunks<V, false>(weights, rows, first, last, weights.inputs, output,
                       [&](auto r, auto t, const Chunk& chunk) {
                         multiply_floats<V, F, r.value, t.value>(weights, x, chunk);
                       });
}

// Each offset is compiled alone: with branches for them sums end up in memory.
template <class V, Format F>
void multiply_offset(const Weights& weights, const QuantizedRows& x, std::size_t rows,
                     std::size_t first, std::size_t last, const Output& output) {
  if (weights.offset == Offset::zeros)
    multiply_bits<V, F, Offset::zeros>(weights, x, rows, first, last, output);
  else if (weights.offset == Offset::minimums)
    multiply_bits<V, F, Offset::minimums>(weights, x, rows, first, last, output);
  else
    multiply_bits<V, F, Offset::none>(weights, x, rows, first, last, output);
}

template <class V>
void multiply_all(const Weights& weights, const QuantizedRows& x, std::size_t rows,
                  std::size_t first, std::size_t last, const Output& output) {
  if (weights.format == Format::fp4)
    multiply_bits<V, Format::fp4, Offset::none>(weights, x, rows, first, last, output);
  else if (weights.format == Format::int4)
    multiply_offset<V, Format::int4>(weights, x, rows, first, last, output);
  else
    multiply_offset<V, Format::int8>(weights, x, rows, first, last, output);
}

template <class V>
void multiply_all_floats(const Weights& weights, const float* x, std::size_t rows,
                         std::size_t first, std::size_t last, const Output& output) {
  if (weights.format == Format::fp8)
    for_chunks<V, false>(weights, rows, first, last, weights.inputs / weights.block, output,
                         [&](auto r, auto t, const Chunk& chunk) {
                           multiply_fp8<V, r.value, t.value>(weights, x, chunk);
                         });
  else if (weights.format == Format::bf16)
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
    // Of the bits without sign: as whole numbers, what is not a number is largest.
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
    result.totals[b] = -result.scales[b] * static_cast<float>(result.sums[b]);
  }
}
