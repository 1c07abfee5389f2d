// Vectors of 16 lanes as two of AVX2. Included inside an anonymous namespace, like tiles.hpp.

template <bool Vnni>
struct Avx2 {
  struct Floats {
    __m256 low, high;
  };
  struct Ints {
    __m256i low, high;
  };
  // 16 registers, two to a vector: 3 rows of a tile have 6 sums of codes and 6 of floats, and 2 are
  // of weights. One row reads four tiles at once, a strip.
  static constexpr int kRows = 3;
  static constexpr std::size_t rows(bool, std::size_t) { return kRows; }
  static constexpr std::size_t tiles(bool, std::size_t rows) {
    return rows == 1 ? 4 : rows == 2 ? 2 : 1;
  }
  static constexpr int kQueries = 3, kVectors = 2;
  static constexpr std::size_t kAhead = 4096;

  static Floats spread(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static Floats load(const float* from) {
    return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
  }
  static void store(float* to, Floats value) {
    _mm256_storeu_ps(to, value.low);
    _mm256_storeu_ps(to + 8, value.high);
  }
  static __m128i halves(const std::uint16_t* from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  }
  static Floats load_fp16(const std::uint16_t* from) {
    return {_mm256_cvtph_ps(halves(from)), _mm256_cvtph_ps(halves(from + 8))};
  }
  static __m256 widen_bf16(__m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static Floats load_bf16(const std::uint16_t* from) {
    return {widen_bf16(halves(from)), widen_bf16(halves(from + 8))};
  }
  static Floats load_fp8(const std::uint8_t* from) {
    const auto bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const auto wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    const auto bits = _mm256_and_si256(wide, _mm256_set1_epi16(-0x4080));
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(bits)),
            _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1))};
  }
  static Floats add(Floats a, Floats b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
  }
  static Floats mul(Floats a, Floats b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
  }
  static Floats divide(Floats a, Floats b) {
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
  }
  static Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  static Floats at_least(Floats a, Floats b) {
    return {_mm256_max_ps(b.low, a.low), _mm256_max_ps(b.high, a.high)};
  }
  static Floats at_most(Floats a, Floats b) {
    return {_mm256_min_ps(b.low, a.low), _mm256_min_ps(b.high, a.high)};
  }
  static Ints round(Floats value) {
    return {_mm256_cvtps_epi32(value.low), _mm256_cvtps_epi32(value.high)};
  }
  static Floats to_floats(Ints value) {
    return {_mm256_cvtepi32_ps(value.low), _mm256_cvtepi32_ps(value.high)};
  }
  static __m256 power(__m256i exponent) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
  }
  static Floats power_of_two(Ints exponent) { return {power(exponent.low), power(exponent.high)}; }

  static Ints fill(std::int32_t value) {
    return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)};
  }
  static Ints add_ints(Ints a, Ints b) {
    return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
  }
  static Ints most(Ints a, Ints b) {
    return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)};
  }
  static Ints magnitude(Floats value) {
    const auto mask = _mm256_set1_epi32(0x7fffffff);
    return {_mm256_and_si256(_mm256_castps_si256(value.low), mask),
            _mm256_and_si256(_mm256_castps_si256(value.high), mask)};
  }
  static float largest(Ints bits) {
    alignas(32) std::int32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_max_epi32(bits.low, bits.high));
    std::int32_t most = lanes[0];
    for (const std::int32_t lane : lanes) most = lane > most ? lane : most;
    float value;
    __builtin_memcpy(&value, &most, sizeof value);
    return value;
  }
  static std::int32_t total(Ints value) {
    alignas(32) std::int32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi32(value.low, value.high));
    std::int32_t sum = 0;
    for (const std::int32_t lane : lanes) sum += lane;
    return sum;
  }
  static Ints clamp_code(Ints value) {
    const auto least = _mm256_set1_epi32(-127), most = _mm256_set1_epi32(127);
    return {_mm256_min_epi32(_mm256_max_epi32(value.low, least), most),
            _mm256_min_epi32(_mm256_max_epi32(value.high, least), most)};
  }
  static void store_codes(std::int8_t* to, Ints codes) {
    const auto pairs = _mm256_packs_epi32(codes.low, codes.high);  // within halves of 128 bits
    const auto words = _mm256_permute4x64_epi64(pairs, 0xd8);
    const auto bytes =
        _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
  }

  // Without VNNI codes of 8 bits are used with their sign: unsigned ones would overflow 16 bits.
  template <int Bits>
  static constexpr std::int32_t zero() {
    return Bits == 4 ? 8 : Vnni ? 128 : 0;
  }
  static Ints bytes(const std::uint8_t* from) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32))};
  }
  static Ints codes(const std::uint8_t* from) {
    const Ints read = bytes(from);
    if constexpr (Vnni) return read;
    const auto flip = _mm256_set1_epi8(-128);
    return {_mm256_xor_si256(read.low, flip), _mm256_xor_si256(read.high, flip)};
  }
  static Ints low_codes(const std::uint8_t* from) {
    const Ints read = bytes(from);
    const auto mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(read.low, mask), _mm256_and_si256(read.high, mask)};
  }
  static Ints high_codes(const std::uint8_t* from) {
    const Ints read = bytes(from);
    const auto mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(_mm256_srli_epi16(read.low, 4), mask),
            _mm256_and_si256(_mm256_srli_epi16(read.high, 4), mask)};
  }
  static __m256i values(__m256i indices) {
    const auto some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kValues));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(some), indices);
  }
  static Ints low_values(const std::uint8_t* from) {
    const Ints indices = low_codes(from);
    return {values(indices.low), values(indices.high)};
  }
  static Ints high_values(const std::uint8_t* from) {
    const Ints indices = high_codes(from);
    return {values(indices.low), values(indices.high)};
  }
  // Zeros of 16 outputs below 0, in the lower 16 bits of lanes whose upper ones are zeros.
  template <int Bits, bool Upper>
  static __m256i eight_zeros(const std::uint8_t* from) {
    auto bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    if constexpr (Bits == 4)
      bytes = Upper ? _mm256_srli_epi32(bytes, 4) : _mm256_and_si256(bytes, _mm256_set1_epi32(15));
    return _mm256_sub_epi16(_mm256_setzero_si256(), bytes);
  }
  template <int Bits, bool Upper>
  static Ints zeros(const std::uint8_t* from) {
    return {eight_zeros<Bits, Upper>(from), eight_zeros<Bits, Upper>(from + 8)};
  }
  // Of numbers in the lower 16 bits, where the upper ones are zeros, and others that fit into 16.
  static Ints times_short(Ints small, Ints others) {
    return {_mm256_madd_epi16(small.low, others.low), _mm256_madd_epi16(small.high, others.high)};
  }
  static __m256i signed_lower(__m256i small) {
    return _mm256_srai_epi32(_mm256_slli_epi32(small, 16), 16);
  }
  static Ints times(Ints small, Ints others) {
    return {_mm256_mullo_epi32(signed_lower(small.low), others.low),
            _mm256_mullo_epi32(signed_lower(small.high), others.high)};
  }
  static __m256i group(const std::int8_t* four) {
    std::int32_t value;
    __builtin_memcpy(&value, four, sizeof value);
    return _mm256_set1_epi32(value);
  }
  // Products of two bytes are summed as 16 bits: at most 2 * 128 * 127, which fits.
  static __m256i dot_pairs(__m256i sum, __m256i weights, __m256i x) {
    const auto pairs = _mm256_maddubs_epi16(weights, x);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static __m256i dot_signed(__m256i sum, __m256i weights, __m256i x) {
    return dot_pairs(sum, _mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
  }
  static Ints dot(Ints sum, Ints weights, const std::int8_t* four) {
    const auto x = group(four);
    if constexpr (Vnni) return dot_vnni(sum, weights, x);
    return {dot_signed(sum.low, weights.low, x), dot_signed(sum.high, weights.high, x)};
  }
  static Ints dot_small(Ints sum, Ints weights, const std::int8_t* four) {
    const auto x = group(four);
    if constexpr (Vnni) return dot_vnni(sum, weights, x);
    return {dot_pairs(sum.low, weights.low, x), dot_pairs(sum.high, weights.high, x)};
  }
  static Ints dot_vnni(Ints sum, Ints weights, __m256i x) {
#ifdef SPECRT_AVX_VNNI
    // As in avx512.hpp: of the intrinsic GCC 12 makes moves besides, 0.7 to 0.9 of the speed.
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.low) : "x"(weights.low), "x"(x));
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.high) : "x"(weights.high), "x"(x));
    return sum;
#else
    (void)weights, (void)x;
    return sum;
#endif
  }
  static void prefetch(const std::uint8_t* at) { SPECRT_PREFETCH(at); }
};
