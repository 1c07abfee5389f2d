// The reference that every instruction set is held to, in plain C++.
#include <cmath>

#include "kernels/instruction_sets.hpp"

namespace specrt::kernels {
namespace {

#include "kernels/entry.hpp"

struct Scalar {
  struct Floats {
    float lanes[kTile];
  };
  struct Ints {
    std::int32_t lanes[kTile];
  };
  struct Codes {
    std::int8_t bytes[kTile * kGroup];
  };
  static constexpr int kRows = 1;
  static constexpr std::size_t rows(bool, std::size_t) { return 1; }
  static constexpr std::size_t tiles(bool, std::size_t) { return 1; }
  static constexpr int kQueries = 1, kVectors = 1;
  static constexpr std::size_t kAhead = 0;

  template <class To, class Each>
  static To each(const Each& value) {
    To result;
    for (std::size_t i = 0; i < kTile; i++) result.lanes[i] = value(i);
    return result;
  }
  static float from_bits(std::uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
  }
  // Normal numbers, then those below 2^-14, then infinities and what is not a number.
  static float widen_fp16(std::uint16_t half) {
    const std::uint32_t sign = (half & 0x8000U) << 16, rest = half & 0x7fffU;
    if (rest >= 0x7c00) return from_bits(sign | 0x7f800000U | (rest & 0x3ffU) << 13);
    if (rest >= 0x400) return from_bits(sign | ((rest << 13) + (112U << 23)));
    const float small = static_cast<float>(rest) * 0x1p-24F;
    return sign != 0 ? -small : small;
  }

  static Floats spread(float value) {
    return each<Floats>([&](std::size_t) { return value; });
  }
  static Floats load(const float* from) {
    return each<Floats>([&](std::size_t i) { return from[i]; });
  }
  static void store(float* to, const Floats& value) {
    for (std::size_t i = 0; i < kTile; i++) to[i] = value.lanes[i];
  }
  static Floats load_fp16(const std::uint16_t* from) {
    return each<Floats>([&](std::size_t i) { return widen_fp16(from[i]); });
  }
  static Floats load_bf16(const std::uint16_t* from) {
    return each<Floats>([&](std::size_t i) { return from_bits(std::uint32_t{from[i]} << 16); });
  }
  static Floats load_fp8(const std::uint8_t* from) {
    return each<Floats>([&](std::size_t i) {
      const std::uint32_t sign = from[i] & 0x80U, rest = from[i] & 0x7fU;
      return widen_fp16(static_cast<std::uint16_t>(sign << 8 | rest << 7));
    });
  }
  static Floats add(const Floats& a, const Floats& b) {
    return each<Floats>([&](std::size_t i) { return a.lanes[i] + b.lanes[i]; });
  }
  static Floats mul(const Floats& a, const Floats& b) {
    return each<Floats>([&](std::size_t i) { return a.lanes[i] * b.lanes[i]; });
  }
  static Floats divide(const Floats& a, const Floats& b) {
    return each<Floats>([&](std::size_t i) { return a.lanes[i] / b.lanes[i]; });
  }
  static Floats fma(const Floats& a, const Floats& b, const Floats& c) {
    return each<Floats>(
        [&](std::size_t i) { return std::fma(a.lanes[i], b.lanes[i], c.lanes[i]); });
  }
  static Floats at_least(const Floats& a, const Floats& b) {
    return each<Floats>(
        [&](std::size_t i) { return b.lanes[i] > a.lanes[i] ? b.lanes[i] : a.lanes[i]; });
  }
  static Floats at_most(const Floats& a, const Floats& b) {
    return each<Floats>(
        [&](std::size_t i) { return b.lanes[i] < a.lanes[i] ? b.lanes[i] : a.lanes[i]; });
  }
  static Ints round(const Floats& value) {
    return each<Ints>([&](std::size_t i) {
      const float lane = value.lanes[i];
      return std::fabs(lane) < 0x1p31F ? static_cast<std::int32_t>(std::nearbyint(lane))
                                       : INT32_MIN;
    });
  }
  static Floats to_floats(const Ints& value) {
    return each<Floats>([&](std::size_t i) { return static_cast<float>(value.lanes[i]); });
  }
  static Floats power_of_two(const Ints& exponent) {
    return each<Floats>([&](std::size_t i) {
      return from_bits(static_cast<std::uint32_t>(exponent.lanes[i] + 127) << 23);
    });
  }

  static Ints fill(std::int32_t value) {
    return each<Ints>([&](std::size_t) { return value; });
  }
  static Ints add_ints(const Ints& a, const Ints& b) {
    return each<Ints>([&](std::size_t i) { return a.lanes[i] + b.lanes[i]; });
  }
  static Ints most(const Ints& a, const Ints& b) {
    return each<Ints>(
        [&](std::size_t i) { return a.lanes[i] > b.lanes[i] ? a.lanes[i] : b.lanes[i]; });
  }
  static Ints magnitude(const Floats& value) {
    return each<Ints>([&](std::size_t i) {
      std::int32_t bits;
      __builtin_memcpy(&bits, &value.lanes[i], sizeof bits);
      return bits & 0x7fffffff;
    });
  }
  static float largest(const Ints& bits) {
    std::int32_t most = 0;
    for (const std::int32_t lane : bits.lanes) most = lane > most ? lane : most;
    return from_bits(static_cast<std::uint32_t>(most));
  }
  static std::int32_t total(const Ints& value) {
    std::int32_t sum = 0;
    for (const std::int32_t lane : value.lanes) sum += lane;
    return sum;
  }
  static Ints clamp_code(const Ints& value) {
    return each<Ints>([&](std::size_t i) {
      const std::int32_t lane = value.lanes[i];
      return lane < -127 ? -127 : lane > 127 ? 127 : lane;
    });
  }
  static void store_codes(std::int8_t* to, const Ints& codes) {
    for (std::size_t i = 0; i < kTile; i++) to[i] = static_cast<std::int8_t>(codes.lanes[i]);
  }

  template <int Bits>
  static constexpr std::int32_t zero() {
    return 0;
  }
  template <class Each>
  static Codes each_code(const Each& value) {
    Codes result;
    for (std::size_t i = 0; i < kTile * kGroup; i++)
      result.bytes[i] = static_cast<std::int8_t>(value(i));
    return result;
  }
  static Codes codes(const std::uint8_t* from) {
    return each_code([&](std::size_t i) { return from[i] - 128; });
  }
  static Codes low_codes(const std::uint8_t* from) {
    return each_code([&](std::size_t i) { return (from[i] & 15) - 8; });
  }
  static Codes high_codes(const std::uint8_t* from) {
    return each_code([&](std::size_t i) { return (from[i] >> 4) - 8; });
  }
  static Codes low_values(const std::uint8_t* from) {
    return each_code([&](std::size_t i) { return kValues[from[i] & 15]; });
  }
  static Codes high_values(const std::uint8_t* from) {
    return each_code([&](std::size_t i) { return kValues[from[i] >> 4]; });
  }
  template <int Bits, bool Upper>
  static Ints zeros(const std::uint8_t* from) {
    const int mask = Bits == 4 ? 15 : 255;
    return each<Ints>([&](std::size_t i) { return -(from[i] >> (Upper ? 4 : 0) & mask); });
  }
  static Ints times(const Ints& small, const Ints& others) {
    return each<Ints>([&](std::size_t i) { return small.lanes[i] * others.lanes[i]; });
  }
  static Ints times_short(const Ints& small, const Ints& others) { return times(small, others); }
  static Ints dot(const Ints& sum, const Codes& weights, const std::int8_t* four) {
    return each<Ints>([&](std::size_t i) {
      std::int32_t result = sum.lanes[i];
      for (std::size_t k = 0; k < kGroup; k++) result += weights.bytes[i * kGroup + k] * four[k];
      return result;
    });
  }
  static Ints dot_small(const Ints& sum, const Codes& weights, const std::int8_t* four) {
    return dot(sum, weights, four);
  }
  static void prefetch(const std::uint8_t*) {}
};

bool supported() { return true; }

}  // namespace

extern const Kernels kScalar = kernels_of<Scalar>("scalar", supported);

}  // namespace specrt::kernels
