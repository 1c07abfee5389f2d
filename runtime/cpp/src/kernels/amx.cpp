// AMX for passes of many rows, over the kernels of AVX-512: Intel from Sapphire Rapids.
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/instruction_sets.hpp"
#include "kernels/target.hpp"

#if !defined(__clang__)
// GCC 12 takes its own intrinsics for reads of what was never written.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

SPECRT_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c,amx-tile,amx-int8")

namespace specrt::kernels {
namespace {

#include "kernels/avx512.hpp"
#include "kernels/entry.hpp"

// Rows of a tile register. A pass has no fewer; its last rows lie in two panels where they must,
// since to configure tiles for fewer takes longer than to multiply some rows twice.
constexpr std::size_t kPanel = 16;
// Most inputs of a tile register: 64 bytes of each row.
constexpr std::size_t kMostInputs = 64;

// What LDTILECFG reads.
struct alignas(64) Configuration {
  std::uint8_t palette = 1, start = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// Intrinsics of tiles do not say which memory they read: what was stored before is there for them.
void finish_stores() { __asm__ volatile("" ::: "memory"); }

// Registers 0 to 3 hold sums of 2 panels with 2 tiles of weights, 4 and 5 rows, 6 and 7 weights.
void configure(std::size_t inputs) {
  Configuration configuration;
  for (int i = 0; i < 8; i++) {
    configuration.rows[i] = i < 6 ? kPanel : static_cast<std::uint8_t>(inputs / kGroup);
    configuration.row_bytes[i] = i == 4 || i == 5 ? static_cast<std::uint16_t>(inputs) : 64;
  }
  finish_stores();
  _tile_loadconfig(&configuration);
}

// Inputs of a tile register: the most of which a block is a multiple.
std::size_t inputs_at_a_time(std::size_t block) {
  std::size_t inputs = kMostInputs;
  while (block % inputs != 0) inputs /= 2;
  return inputs;
}

// Codes of 4 bits as bytes, those of 4 inputs after those of the 4 before.
template <Format F>
void expand(const std::uint8_t* values, std::size_t stride, std::size_t inputs,
            std::uint8_t* bytes) {
  for (std::size_t i = 0; i < inputs; i += 2 * kGroup, values += stride) {
    constexpr bool is_table = F == Format::fp4;
    _mm512_store_si512(bytes + i * kTile,
                       is_table ? Avx512::low_values(values) : Avx512::low_codes(values));
    _mm512_store_si512(bytes + (i + kGroup) * kTile,
                       is_table ? Avx512::high_values(values) : Avx512::high_codes(values));
  }
}

// P panels of rows with T tiles of weights.
template <Format F, int P, int T>
void multiply_panels(const Weights& weights, const QuantizedRows& x, std::size_t row,
                     std::size_t second, std::size_t tile, const Output& output) {
  const std::size_t inputs = weights.inputs, block = weights.block, blocks = inputs / block;
  constexpr int Bits = F == Format::int8 ? 8 : 4;
  const std::size_t step = inputs_at_a_time(block), tile_scales = kTile * weights.scale_bytes;
  const std::size_t side = tile % kStrip, strip = weights.strip_tiles(tile), rows[] = {row, second};
  const std::uint8_t* values = weights.values + weights.strip_values(tile, 0);
  alignas(64) std::uint8_t bytes[2][kMostInputs * kTile];
  alignas(64) std::int32_t whole[P][T][kPanel][kTile];
  alignas(64) float sums[P][kPanel][kStrip][kTile] = {};
  for (std::size_t b = 0; b < blocks; b++) {
    _tile_zero(0);
    if constexpr (T > 1) _tile_zero(1);
    if constexpr (P > 1) _tile_zero(2);
    if constexpr (P > 1 && T > 1) _tile_zero(3);
    for (std::size_t k = b * block; k < (b + 1) * block; k += step) {
      const std::uint8_t* at[2] = {values + side * 64, values + (side + T - 1) * 64};
      values += step * strip * kTile * Bits / 8;
      if constexpr (Bits == 4) {
        for (int t = 0; t < T; t++) {
          expand<F>(at[t], strip * 64, step, bytes[t]);
          at[t] = bytes[t];
        }
        finish_stores();
      }
      const auto stride = static_cast<long>(inputs);
      const auto apart = static_cast<long>(Bits == 4 ? 64 : strip * 64);  // inputs of a tile
      _tile_loadd(6, at[0], apart);
      _tile_loadd(4, x.codes + rows[0] * inputs + k, stride);
      _tile_dpbsud(0, 4, 6);
      if constexpr (T > 1) {
        _tile_loadd(7, at[1], apart);
        _tile_dpbsud(1, 4, 7);
      }
      if constexpr (P > 1) {
        _tile_loadd(5, x.codes + rows[1] * inputs + k, stride);
        _tile_dpbsud(2, 5, 6);
        if constexpr (T > 1) _tile_dpbsud(3, 5, 7);
      }
    }
    _tile_stored(0, whole[0][0], 64);
    if constexpr (T > 1) _tile_stored(1, whole[0][1], 64);
    if constexpr (P > 1) _tile_stored(2, whole[1][0], 64);
    if constexpr (P > 1 && T > 1) _tile_stored(3, whole[1][1], 64);
    const std::size_t tile_offsets = weights.offset_bytes(b);
    for (int t = 0; t < T; t++) {
      const auto scale = load_scales<Avx512>(weights, values + (side + t) * tile_scales);
      const std::uint8_t* offsets = values + strip * tile_scales + (side + t) * tile_offsets;
      auto zeros = Avx512::fill(0);
      if (weights.offset == Offset::zeros) {
        const auto* at = values + weights.zeros_at(tile + static_cast<std::size_t>(t), b);
        zeros = tile_offsets > 0 ? Avx512::zeros<Bits, false>(at) : Avx512::zeros<Bits, true>(at);
      }
      auto minimum = Avx512::spread(0);
      if (weights.offset == Offset::minimums) minimum = load_scales<Avx512>(weights, offsets);
      for (int p = 0; p < P; p++)
        for (std::size_t r = 0; r < kPanel; r++) {
          const std::size_t place = (rows[p] + r) * blocks + b;
          const auto begin =
              weights.offset == Offset::zeros
                  ? begin_with<Avx512, F>(zeros, Avx512::fill(x.sums[place]), block <= kShortBlock)
                  : Avx512::fill(begin_with<Avx512, F>(weights.offset, x.sums[place]));
          const auto sum = Avx512::add_ints(_mm512_load_si512(whole[p][t][r]), begin);
          const auto both = Avx512::mul(scale, Avx512::spread(x.scales[place]));
          float* to = sums[p][r][t];
          auto all = Avx512::fma(Avx512::to_floats(sum), both, Avx512::load(to));
          if (weights.offset == Offset::minimums)
            all = Avx512::fma(minimum, Avx512::spread(x.totals[place]), all);
          Avx512::store(to, all);
        }
    }
    values += strip * (tile_scales + tile_offsets);
  }
  for (int p = 0; p < P; p++)
    finish<Avx512>(weights, output, rows[p], kPanel, tile, tile + T, sums[p][0][0]);
}

template <Format F, int T>
void multiply_tiles(const Weights& weights, const QuantizedRows& x, std::size_t rows,
                    std::size_t tile, const Output& output) {
  std::size_t row = 0;
  for (; rows - row > kPanel; row += 2 * kPanel) {
    const std::size_t second = row + kPanel, last = rows - kPanel;
    multiply_panels<F, 2, T>(weights, x, row, second < last ? second : last, tile, output);
    if (rows - row <= 2 * kPanel) return;
  }
  const std::size_t last = rows - kPanel;
  multiply_panels<F, 1, T>(weights, x, last, last, tile, output);
}

template <Format F>
void multiply_wide(const Weights& weights, const QuantizedRows& x, std::size_t rows,
                   std::size_t first, std::size_t last, const Output& output) {
  configure(inputs_at_a_time(weights.block));
  for (std::size_t tile = first; tile < last;) {
    if (last - tile > 1 && tile % kStrip + 1 < kStrip) {
      multiply_tiles<F, 2>(weights, x, rows, tile, output);
      tile += 2;
    } else {
      multiply_tiles<F, 1>(weights, x, rows, tile, output);
      tile++;
    }
  }
  _tile_release();
}

// Fewer rows leave a tile register partly empty, and AVX-512 is bound by memory then.
void multiply(const Weights& weights, const QuantizedRows& x, std::size_t rows, std::size_t first,
              std::size_t last, const Output& output) {
  if (rows < kPanel)
    kAvx512Vnni.multiply(weights, x, rows, first, last, output);
  else if (weights.format == Format::int4)
    multiply_wide<Format::int4>(weights, x, rows, first, last, output);
  else if (weights.format == Format::fp4)
    multiply_wide<Format::fp4>(weights, x, rows, first, last, output);
  else
    multiply_wide<Format::int8>(weights, x, rows, first, last, output);
}

// Whether a small product has the bits of the reference. Written without a machine that has AMX:
// where tiles do something else than their description says, other kernels run. Tests of all
// kernels hold these ones, too, where a machine has them, and elsewhere over tiles that are
// emulated.
bool agrees(Format format) {
  constexpr std::size_t rows = 40, outputs = 80, inputs = 128, block = 64, blocks = inputs / block;
  alignas(64) std::uint8_t values[outputs * (inputs + blocks * sizeof(float))];
  alignas(64) float row_scales[rows * blocks];
  alignas(64) std::int8_t codes[rows * inputs];
  std::int32_t sums[rows * blocks] = {};
  float found[rows * outputs], expected[rows * outputs];
  std::uint32_t state = 1;
  const auto next = [&] { return (state = state * 1664525U + 1013904223U) >> 16; };
  for (auto& value : values) value = static_cast<std::uint8_t>(next());
  for (auto& scale : row_scales) scale = static_cast<float>(next()) * 0x1p-16F;
  for (std::size_t i = 0; i < rows * inputs; i++) {
    codes[i] = static_cast<std::int8_t>(static_cast<int>(next() % 255) - 127);
    sums[i / block] += codes[i];
  }
  const Weights weights{format, outputs, inputs, block, outputs / kTile, sizeof(float), values};
  for (std::size_t i = 0; i < outputs * blocks; i++) {
    const std::size_t output = i / blocks, tile = output / kTile;
    const float scale = static_cast<float>(next()) * 0x1p-20F;
    std::uint8_t* scales = values + weights.strip_scales(tile, i % blocks);
    __builtin_memcpy(scales + output % (kStrip * kTile) * sizeof scale, &scale, sizeof scale);
  }
  const QuantizedRows x{codes, row_scales, sums, nullptr};
  multiply(weights, x, rows, 0, outputs / kTile, {found, outputs, nullptr, Activation::none});
  kScalar.multiply(weights, x, rows, 0, outputs / kTile,
                   {expected, outputs, nullptr, Activation::none});
  return __builtin_memcmp(found, expected, sizeof found) == 0;
}

// Linux lends the registers to a process that asks for them: ARCH_REQ_XCOMP_PERM of XTILEDATA.
bool permitted() {
#if defined(__linux__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool has_leaf = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0;
  const unsigned tile_and_int8 = 3U << 24;
  return has_leaf && (edx & tile_and_int8) == tile_and_int8 &&
         syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}

bool supported() {
  static const bool is_supported =
      kAvx512Vnni.supported() && permitted() && agrees(Format::int8) && agrees(Format::int4);
  return is_supported;
}

}  // namespace

extern const Kernels kAmx = kernels_over<kAvx512Vnni>("amx", supported, multiply);

}  // namespace specrt::kernels

SPECRT_TARGET_END
#endif
