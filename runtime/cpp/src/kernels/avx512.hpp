// Vectors of 16 lanes of AVX-512. Included inside an anonymous namespace, like tiles.hpp.

struct Avx512 {
  using Floats = __m512;
  using Ints = __m512i;
  // Four tiles are a strip, which a core reads as one stream. Codes have two sums, one of them of
  // floats, touched once a block: 6 rows of 4 tiles keep 24 sums of codes in the 32 registers, and
  // an operand of 4 codes of a row is read once for 4 multiply-adds. More rows are parts of 4,
  // whose tiles take fewer registers. Floats have one sum: 6 rows of 4 tiles are 24.
  static constexpr int kRows = 6;
  static constexpr std::size_t rows(bool codes, std::size_t all) {
    return codes && all > kRows ? 4 : kRows;
  }
  static constexpr std::size_t tiles(bool, std::size_t) { return 4; }
  // 6 queries with 4 groups of keys, or with 4 vectors of values, have 24 sums.
  static constexpr int kQueries = 6, kVectors = 4;
  // 1 KiB of the stream takes up to 1.2 times as long, 2 KiB 1.1 times, 8 KiB as long.
  static constexpr std::size_t kAhead = 4096;

  static Floats spread(float value) { return _mm512_set1_ps(value); }
  static Floats load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, Floats value) { _mm512_storeu_ps(to, value); }
  static Floats load_fp16(const std::uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static Floats load_bf16(const std::uint16_t* from) {
    const auto wide =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static Floats load_fp8(const std::uint8_t* from) {
    const auto bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const auto wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16(-0x4080)));
  }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static Floats at_least(Floats a, Floats b) { return _mm512_max_ps(b, a); }
  static Floats at_most(Floats a, Floats b) { return _mm512_min_ps(b, a); }
  static Ints round(Floats value) { return _mm512_cvtps_epi32(value); }
  static Floats to_floats(Ints value) { return _mm512_cvtepi32_ps(value); }
  static Floats power_of_two(Ints exponent) {
    const auto biased = _mm512_add_epi32(exponent, _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
  }

  static Ints fill(std::int32_t value) { return _mm512_set1_epi32(value); }
  static Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  static Ints most(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
  static Ints magnitude(Floats value) {
    return _mm512_and_si512(_mm512_castps_si512(value), _mm512_set1_epi32(0x7fffffff));
  }
  static float largest(Ints bits) {
    const std::int32_t most = _mm512_reduce_max_epi32(bits);
    float value;
    __builtin_memcpy(&value, &most, sizeof value);
    return value;
  }
  static std::int32_t total(Ints value) { return _mm512_reduce_add_epi32(value); }
  static Ints clamp_code(Ints value) {
    return _mm512_min_epi32(_mm512_max_epi32(value, fill(-127)), fill(127));
  }
  static void store_codes(std::int8_t* to, Ints codes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(codes));
  }

  template <int Bits>
  static constexpr std::int32_t zero() {
    return Bits == 8 ? 128 : 8;
  }
  static Ints codes(const std::uint8_t* from) { return _mm512_loadu_si512(from); }
  static Ints low_codes(const std::uint8_t* from) {
    return _mm512_and_si512(codes(from), _mm512_set1_epi8(15));
  }
  static Ints high_codes(const std::uint8_t* from) {
    return _mm512_and_si512(_mm512_srli_epi16(codes(from), 4), _mm512_set1_epi8(15));
  }
  static Ints values(Ints indices) {
    const auto some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kValues));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(some), indices);
  }
  static Ints low_values(const std::uint8_t* from) { return values(low_codes(from)); }
  static Ints high_values(const std::uint8_t* from) { return values(high_codes(from)); }
  // Zeros of 16 outputs below 0, in the lower 16 bits of lanes whose upper ones are zeros.
  template <int Bits, bool Upper>
  static Ints zeros(const std::uint8_t* from) {
    auto bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    if constexpr (Bits == 4)
      bytes = Upper ? _mm512_srli_epi32(bytes, 4) : _mm512_and_si512(bytes, _mm512_set1_epi32(15));
    return _mm512_sub_epi16(_mm512_setzero_si512(), bytes);
  }
  // Of numbers in the lower 16 bits, where the upper ones are zeros, and others that fit into 16.
  static Ints times_short(Ints small, Ints others) { return _mm512_madd_epi16(small, others); }
  static Ints times(Ints small, Ints others) {
    return _mm512_mullo_epi32(_mm512_srai_epi32(_mm512_slli_epi32(small, 16), 16), others);
  }
  static Ints dot(Ints sum, Ints weights, const std::int8_t* four) {
    std::int32_t group;
    __builtin_memcpy(&group, four, sizeof group);
    // Of the intrinsic GCC 12 makes two moves and a second load of the weights: 0.8 of the speed.
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(_mm512_set1_epi32(group)));
    return sum;
  }
  static Ints dot_small(Ints sum, Ints weights, const std::int8_t* four) {
    return dot(sum, weights, four);
  }
  static void prefetch(const std::uint8_t* at) { SPECRT_PREFETCH(at); }
};
