// Vectors of 16 lanes as four of NEON. Included inside an anonymous namespace, like tiles.hpp.

template <bool Mixed>
struct Neon {
  struct Floats {
    float32x4_t quarters[4];
  };
  struct Ints {
    int32x4_t quarters[4];
  };
  struct Codes {
    uint8x16_t quarters[4];
  };
  // 32 registers: 4 rows of a tile have 16 sums of codes, 4 of weights and one of codes of a row;
  // their 16 sums of floats wait in memory, once a block. A row alone has 8 sums in 2 tiles: two
  // pipes that take 4 cycles for a multiply-add are busy then.
  static constexpr int kRows = 4;
  static constexpr std::size_t rows(bool, std::size_t) { return kRows; }
  static constexpr std::size_t tiles(bool, std::size_t rows) { return rows == 1 ? 2 : 1; }
  // 6 queries with a group of keys or a vector of values have 24 sums; 4 are of those, one of a
  // query.
  static constexpr int kQueries = 6, kVectors = 1;
  static constexpr std::size_t kAhead = 1024;

  template <class To, class Each>
  static To each(const Each& value) {
    return {{value(0), value(1), value(2), value(3)}};
  }

  static Floats spread(float value) {
    return each<Floats>([&](int) { return vdupq_n_f32(value); });
  }
  static Floats load(const float* from) {
    return each<Floats>([&](int i) { return vld1q_f32(from + 4 * i); });
  }
  static void store(float* to, const Floats& value) {
    for (int i = 0; i < 4; i++) vst1q_f32(to + 4 * i, value.quarters[i]);
  }
  static Floats load_fp16(const std::uint16_t* from) {
    return each<Floats>(
        [&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + 4 * i))); });
  }
  static Floats load_bf16(const std::uint16_t* from) {
    return each<Floats>(
        [&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from + 4 * i), 16)); });
  }
  static Floats load_fp8(const std::uint8_t* from) {
    return each<Floats>([&](int i) {
      std::int32_t four;
      __builtin_memcpy(&four, from + 4 * i, sizeof four);
      const auto wide = vmovl_s8(vcreate_s8(static_cast<std::uint32_t>(four)));
      const auto bits =
          vand_u16(vreinterpret_u16_s16(vget_low_s16(vshlq_n_s16(wide, 7))), vdup_n_u16(0xbf80));
      return vcvt_f32_f16(vreinterpret_f16_u16(bits));
    });
  }
  static Floats add(const Floats& a, const Floats& b) {
    return each<Floats>([&](int i) { return vaddq_f32(a.quarters[i], b.quarters[i]); });
  }
  static Floats mul(const Floats& a, const Floats& b) {
    return each<Floats>([&](int i) { return vmulq_f32(a.quarters[i], b.quarters[i]); });
  }
  static Floats divide(const Floats& a, const Floats& b) {
    return each<Floats>([&](int i) { return vdivq_f32(a.quarters[i], b.quarters[i]); });
  }
  static Floats fma(const Floats& a, const Floats& b, const Floats& c) {
    return each<Floats>(
        [&](int i) { return vfmaq_f32(c.quarters[i], a.quarters[i], b.quarters[i]); });
  }
  // By comparison: vmaxq returns what is not a number from either side, and 0 of 0 and -0.
  static Floats at_least(const Floats& a, const Floats& b) {
    return each<Floats>([&](int i) {
      return vbslq_f32(vcgtq_f32(b.quarters[i], a.quarters[i]), b.quarters[i], a.quarters[i]);
    });
  }
  static Floats at_most(const Floats& a, const Floats& b) {
    return each<Floats>([&](int i) {
      return vbslq_f32(vcltq_f32(b.quarters[i], a.quarters[i]), b.quarters[i], a.quarters[i]);
    });
  }
  // Halves to even; what fits no integer becomes the least one, as on x86.
  static Ints round(const Floats& value) {
    return each<Ints>([&](int i) {
      const auto fits = vcaltq_f32(value.quarters[i], vdupq_n_f32(0x1p31F));
      return vbslq_s32(fits, vcvtnq_s32_f32(value.quarters[i]), vdupq_n_s32(INT32_MIN));
    });
  }
  static Floats to_floats(const Ints& value) {
    return each<Floats>([&](int i) { return vcvtq_f32_s32(value.quarters[i]); });
  }
  static Floats power_of_two(const Ints& exponent) {
    return each<Floats>([&](int i) {
      const auto biased = vaddq_s32(exponent.quarters[i], vdupq_n_s32(127));
      return vreinterpretq_f32_s32(vshlq_n_s32(biased, 23));
    });
  }

  static Ints fill(std::int32_t value) {
    return each<Ints>([&](int) { return vdupq_n_s32(value); });
  }
  static Ints add_ints(const Ints& a, const Ints& b) {
    return each<Ints>([&](int i) { return vaddq_s32(a.quarters[i], b.quarters[i]); });
  }
  static Ints most(const Ints& a, const Ints& b) {
    return each<Ints>([&](int i) { return vmaxq_s32(a.quarters[i], b.quarters[i]); });
  }
  static Ints magnitude(const Floats& value) {
    return each<Ints>([&](int i) {
      return vandq_s32(vreinterpretq_s32_f32(value.quarters[i]), vdupq_n_s32(0x7fffffff));
    });
  }
  static float largest(const Ints& bits) {
    const std::int32_t most = vmaxvq_s32(vmaxq_s32(vmaxq_s32(bits.quarters[0], bits.quarters[1]),
                                                   vmaxq_s32(bits.quarters[2], bits.quarters[3])));
    float value;
    __builtin_memcpy(&value, &most, sizeof value);
    return value;
  }
  static std::int32_t total(const Ints& value) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(value.quarters[0], value.quarters[1]),
                                vaddq_s32(value.quarters[2], value.quarters[3])));
  }
  static Ints clamp_code(const Ints& value) {
    return each<Ints>([&](int i) {
      return vminq_s32(vmaxq_s32(value.quarters[i], vdupq_n_s32(-127)), vdupq_n_s32(127));
    });
  }
  static void store_codes(std::int8_t* to, const Ints& codes) {
    const auto low = vcombine_s16(vmovn_s32(codes.quarters[0]), vmovn_s32(codes.quarters[1]));
    const auto high = vcombine_s16(vmovn_s32(codes.quarters[2]), vmovn_s32(codes.quarters[3]));
    vst1q_s8(to, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
  }

  // SDOT takes bytes with their sign, USDOT those of weights without.
  template <int Bits>
  static constexpr std::int32_t zero() {
    return Bits == 4 ? 8 : Mixed ? 128 : 0;
  }
  static Codes codes(const std::uint8_t* from) {
    return each<Codes>([&](int i) {
      const auto read = vld1q_u8(from + 16 * i);
      return Mixed ? read : veorq_u8(read, vdupq_n_u8(128));
    });
  }
  static Codes low_codes(const std::uint8_t* from) {
    return each<Codes>([&](int i) { return vandq_u8(vld1q_u8(from + 16 * i), vdupq_n_u8(15)); });
  }
  static Codes high_codes(const std::uint8_t* from) {
    return each<Codes>([&](int i) { return vshrq_n_u8(vld1q_u8(from + 16 * i), 4); });
  }
  static Codes values(const Codes& indices) {
    return each<Codes>([&](int i) { return vqtbl1q_u8(vld1q_u8(kValues), indices.quarters[i]); });
  }
  static Codes low_values(const std::uint8_t* from) { return values(low_codes(from)); }
  static Codes high_values(const std::uint8_t* from) { return values(high_codes(from)); }
  // Zeros of 16 outputs below 0.
  template <int Bits, bool Upper>
  static Ints zeros(const std::uint8_t* from) {
    auto bytes = vld1q_u8(from);
    if constexpr (Bits == 4) bytes = Upper ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
    const auto first = vnegq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes))));
    const auto second = vnegq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(bytes))));
    return {{vmovl_s16(vget_low_s16(first)), vmovl_s16(vget_high_s16(first)),
             vmovl_s16(vget_low_s16(second)), vmovl_s16(vget_high_s16(second))}};
  }
  static Ints times(const Ints& small, const Ints& others) {
    return each<Ints>([&](int i) { return vmulq_s32(small.quarters[i], others.quarters[i]); });
  }
  static Ints times_short(const Ints& small, const Ints& others) { return times(small, others); }
  static Ints dot(const Ints& sum, const Codes& weights, const std::int8_t* four) {
    // In the low lane, which a load does alone; to spread it would take a multiply pipe in places.
    std::int32_t value;
    __builtin_memcpy(&value, four, sizeof value);
    const auto group = vreinterpretq_s8_s32(vsetq_lane_s32(value, vdupq_n_s32(0), 0));
    return each<Ints>([&](int i) {
#if defined(__clang__)  // 14 and 15 have the intrinsics for whole files only, not for functions
      auto all = sum.quarters[i];
      if constexpr (Mixed)
        __asm__("usdot %0.4s, %1.16b, %2.4b[0]" : "+w"(all) : "w"(weights.quarters[i]), "w"(group));
      else
        __asm__("sdot %0.4s, %1.16b, %2.4b[0]" : "+w"(all) : "w"(weights.quarters[i]), "w"(group));
      return all;
#else
#ifdef SPECRT_I8MM
      if constexpr (Mixed) return vusdotq_laneq_s32(sum.quarters[i], weights.quarters[i], group, 0);
#endif
      return vdotq_laneq_s32(sum.quarters[i], vreinterpretq_s8_u8(weights.quarters[i]), group, 0);
#endif
    });
  }
  static Ints dot_small(const Ints& sum, const Codes& weights, const std::int8_t* four) {
    return dot(sum, weights, four);
  }
  // In assembly: GCC 12 drops the built-in one from a lambda, as if it did nothing.
  static void prefetch(const std::uint8_t* at) {
    __asm__ volatile("prfm pldl1keep, [%0]" : : "r"(at));
  }
};
