#include "kernels/kernels.hpp"

#include <cstring>
#include <vector>

#include "kernels/instruction_sets.hpp"

namespace specrt::kernels {

namespace {

float widen_fp16(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000U) << 16, rest = half & 0x7fffU;
  std::uint32_t bits = sign;
  if (rest >= 0x7c00) {
    bits |= 0x7f800000U | (rest & 0x3ffU) << 13;
  } else if (rest >= 0x400) {
    bits |= (rest << 13) + (112U << 23);
  } else {
    const float small = static_cast<float>(rest) * 0x1p-24F;
    return sign != 0 ? -small : small;
  }
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class Number>
Number read(const std::uint8_t* from, std::size_t index) {
  Number value;
  std::memcpy(&value, from + index * sizeof value, sizeof value);
  return value;
}

float read_scale(const Weights& weights, const std::uint8_t* from, std::size_t index) {
  return weights.scale_bytes == 2 ? widen_fp16(read<std::uint16_t>(from, index))
                                  : read<float>(from, index);
}

// The weight of an output of a tile and an input.
float weight_of(const Weights& weights, std::size_t tile, std::size_t output, std::size_t input) {
  const std::uint8_t* values = weights.values + weights.strip_values(tile, 0);
  const std::size_t side = tile % kStrip, strip = weights.strip_tiles(tile);
  const std::size_t place = (input * strip + side) * kTile + output;
  if (weights.format == Format::fp32) return read<float>(values, place);
  if (weights.format == Format::fp16) return widen_fp16(read<std::uint16_t>(values, place));
  if (weights.format == Format::bf16) {
    const std::uint32_t bits = std::uint32_t{read<std::uint16_t>(values, place)} << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  const std::uint8_t* scales = weights.values + weights.strip_scales(tile, input / weights.block);
  const std::uint8_t* codes = scales - strip * weights.value_bytes(weights.block);
  const float scale = read_scale(weights, scales, side * kTile + output);
  if (weights.format == Format::fp8) {
    const std::uint8_t code = codes[(input % weights.block * strip + side) * kTile + output];
    const std::uint32_t half = (code & 0x80U) << 8 | (code & 0x7fU) << 7;
    return widen_fp16(static_cast<std::uint16_t>(half)) * kFp8Raised * scale;
  }
  const bool small = weights.format != Format::int8;
  const std::size_t step = small ? 2 * kGroup : kGroup;
  const std::size_t group = (input % weights.block / step * strip + side) * kTile + output;
  const std::uint8_t byte = codes[group * kGroup + input % kGroup];
  const int code = !small ? byte : input % step < kGroup ? byte & 15 : byte >> 4;
  if (weights.format == Format::fp4) return static_cast<float>(kValues[code] - kMiddle) * scale;
  if (weights.offset == Offset::minimums) {
    const std::size_t index = (strip + side) * kTile + output;
    return static_cast<float>(code) * scale - read_scale(weights, scales, index);
  }
  int zero = small ? 8 : 128;
  if (weights.offset == Offset::zeros) {
    const std::size_t block = input / weights.block;
    zero = scales[weights.zeros_at(tile, block) + static_cast<std::ptrdiff_t>(output)];
    if (small) zero = zero >> weights.zero_shift(block) & 15;
  }
  return static_cast<float>(code - zero) * scale;
}

}  // namespace

void look_up(const Weights& weights, std::size_t row, float* y) {
  for (std::size_t i = 0; i < weights.inputs; i++)
    y[i] = weight_of(weights, row / kTile, row % kTile, i);
}

void multiply_exactly(const Weights& weights, const float* x, std::size_t rows, std::size_t first,
                      std::size_t last, const Output& output) {
  // The tile as floats, which the kernels for floats then multiply with.
  std::vector<float> floats(2 * kTile * weights.inputs);
  const std::size_t step = output.activation == Activation::none ? 1 : 2;
  for (std::size_t tile = first; tile < last; tile += step) {
    for (std::size_t i = 0; i < weights.inputs; i++)
      for (std::size_t j = 0; j < step * kTile; j++)
        floats[i * step * kTile + j] = weight_of(weights, tile + j / kTile, j % kTile, i);
    Weights part = weights;
    part.format = Format::fp32;
    part.block = part.scale_bytes = 0;
    part.offset = Offset::none;
    part.tiles = step;
    // None where a last strip is filled up with tiles.
    part.outputs = weights.outputs > tile * kTile ? weights.outputs - tile * kTile : 0;
    part.values = reinterpret_cast<const std::uint8_t*>(floats.data());
    Output moved = output;
    moved.y += tile / step * kTile;
    if (moved.bias != nullptr) moved.bias += tile * kTile;
    find_kernels("")->multiply_floats(part, x, rows, 0, step, moved);
  }
}

const Kernels* const* all_kernels() {
  static const Kernels* const all[] = {
#if defined(__x86_64__)
      &kAmx,    &kAvx512Vnni, &kAvxVnni, &kAvx2,
#elif defined(__aarch64__)
      &kI8mm, &kDotProd,
#endif
      &kScalar, nullptr};
  return all;
}

const Kernels* find_kernels(const char* name) {
  for (const Kernels* const* entry = all_kernels(); *entry != nullptr; entry++)
    if ((*name == '\0' || std::strcmp(name, (*entry)->name) == 0) && (*entry)->supported())
      return *entry;
  return nullptr;
}

std::size_t attend_floats(const Attention& attention, std::size_t count, std::size_t position) {
  const std::size_t queries = count * (attention.heads / attention.kv_heads);
  return queries * (attention.query_stride() + 1 + (position / kTile + 2) * kTile);
}

std::size_t recur_floats(const Recurrence& recurrence) { return kPanel * recurrence.key_size; }

void keep_factors(const Recurrence& recurrence, const Steps& steps, const RecurrentRow& row,
                  std::size_t token) {
  std::memcpy(recurrence.factors_of(row.row, row.start + token - row.first),
              steps.prepared + token * recurrence.prepared_size(),
              recurrence.factors_stride() * sizeof(float));
}

}  // namespace specrt::kernels
