#include "native/bundle/sha256.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <tuple>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace specrt::native {

namespace {

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
alignas(16) constexpr std::uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t rotated(std::uint32_t x, int by) { return x >> by | x << (32 - by); }

#if defined(__x86_64__)

bool has_instructions() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool ssse3_sse41 = __get_cpuid(1, &a, &b, &c, &d) && (c & 1u << 9) && (c & 1u << 19);
  return ssse3_sse41 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & 1u << 29);
}

// Four rounds an iteration. The instructions keep the state as ABEF and CDGH, and four schedule
// words in a register; of the schedule the latest sixteen are held.
__attribute__((target("sha,sse4.1,ssse3"))) void blocks_by_instructions(std::uint32_t* state,
                                                                        const unsigned char* data,
                                                                        std::size_t blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  const auto* in = reinterpret_cast<const __m128i*>(state);
  const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(in), 0xB1);
  const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(in + 1), 0x1B);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
  __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xF0);
  for (; blocks > 0; --blocks, data += 64) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i words[4];
    for (int i = 0; i < 16; ++i) {
      __m128i& now = words[i & 3];
      if (i < 4) {
        now = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i);
        now = _mm_shuffle_epi8(now, swap);
      } else {  // words of 16, 15, 7 and 2 before
        const __m128i& last = words[(i + 3) & 3];
        now = _mm_sha256msg1_epu32(now, words[(i + 1) & 3]);
        now = _mm_add_epi32(now, _mm_alignr_epi8(last, words[(i + 2) & 3], 4));
        now = _mm_sha256msg2_epu32(now, last);
      }
      const auto* constants = reinterpret_cast<const __m128i*>(kRounds) + i;
      const __m128i sum = _mm_add_epi32(now, _mm_load_si128(constants));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  auto* out = reinterpret_cast<__m128i*>(state);
  _mm_storeu_si128(out, _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(out + 1, _mm_alignr_epi8(dchg, feba, 8));
}

#endif

std::array<std::uint32_t, 64> schedule(const unsigned char* data) {
  std::array<std::uint32_t, 64> w;
  for (std::size_t i = 0; i < 16; ++i)
    w[i] = std::uint32_t{data[4 * i]} << 24 | std::uint32_t{data[4 * i + 1]} << 16 |
           std::uint32_t{data[4 * i + 2]} << 8 | data[4 * i + 3];
  for (std::size_t i = 16; i < 64; ++i) {
    const std::uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + (rotated(a, 7) ^ rotated(a, 18) ^ a >> 3) + w[i - 7] +
           (rotated(b, 17) ^ rotated(b, 19) ^ b >> 10);
  }
  return w;
}

}  // namespace

void sha256_blocks_plain(std::uint32_t* state, const unsigned char* data, std::size_t blocks) {
  for (; blocks > 0; --blocks, data += 64) {
    const std::array<std::uint32_t, 64> w = schedule(data);
    std::uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    std::uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (std::size_t i = 0; i < 64; ++i) {
      const std::uint32_t mixed = rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25);
      const std::uint32_t first = h + mixed + ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
      const std::uint32_t spread = rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22);
      const std::uint32_t second = spread + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + first;
      d = c, c = b, b = a, a = first + second;
    }
    const std::uint32_t after[] = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) state[i] += after[i];
  }
}

void sha256_blocks(std::uint32_t* state, const unsigned char* data, std::size_t blocks) {
#if defined(__x86_64__)
  static const bool kInstructions = has_instructions();
  if (kInstructions) return blocks_by_instructions(state, data, blocks);
#endif
  sha256_blocks_plain(state, data, blocks);
}

void Sha256::update(const void* data, std::size_t bytes) {
  const auto* from = static_cast<const unsigned char*>(data);
  bytes_ += bytes;
  if (held_ > 0) {
    const std::size_t taken = std::min(bytes, block_.size() - held_);
    std::copy_n(from, taken, block_.begin() + static_cast<std::ptrdiff_t>(held_));
    held_ += taken;
    from += taken;
    bytes -= taken;
    if (held_ < block_.size()) return;
    sha256_blocks(state_.data(), block_.data(), 1);
    held_ = 0;
  }
  const std::size_t blocks = bytes / 64;
  if (blocks > 0) sha256_blocks(state_.data(), from, blocks);
  held_ = bytes % 64;
  if (held_ > 0) std::copy_n(from + blocks * 64, held_, block_.begin());
}

std::string Sha256::finish() {
  const std::uint64_t bits = bytes_ * 8;
  const unsigned char one = 0x80, zero = 0;
  update(&one, 1);
  while (held_ != 56) update(&zero, 1);
  std::array<unsigned char, 8> length;
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<unsigned char>(bits >> (56 - 8 * i));
  update(length.data(), length.size());
  constexpr char kHex[] = "0123456789abcdef";
  std::string result;
  for (const std::uint32_t word : state_)
    for (int shift = 28; shift >= 0; shift -= 4) result += kHex[word >> shift & 15];
  return result;
}

namespace {

struct Descriptor {
  explicit Descriptor(const std::string& path) : number(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (number < 0) throw std::system_error(errno, std::generic_category());
  }
  ~Descriptor() { close(number); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number;
};

FileState state_in(const struct stat& info) {
  const auto nanoseconds = [](const timespec& time) {
    return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  };
  return {info.st_dev, info.st_ino, static_cast<std::uint64_t>(info.st_size),
          nanoseconds(info.st_mtim), nanoseconds(info.st_ctim)};
}

}  // namespace

bool FileState::operator==(const FileState& other) const {
  return std::tie(device, inode, bytes, modified_ns, changed_ns) ==
         std::tie(other.device, other.inode, other.bytes, other.modified_ns, other.changed_ns);
}

FileState state_of(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) throw std::system_error(errno, std::generic_category());
  return state_in(info);
}

HashedFile hash_file(const std::string& path) {
  const Descriptor file(path);
  Sha256 digest;
  HashedFile result;
  struct stat info;
  if (fstat(file.number, &info) != 0) throw std::system_error(errno, std::generic_category());
  result.state = state_in(info);
  std::vector<unsigned char> piece(1 << 18);
  while (true) {
    const ssize_t count = read(file.number, piece.data(), piece.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw std::system_error(errno, std::generic_category());
    if (count == 0) break;
    digest.update(piece.data(), static_cast<std::size_t>(count));
    result.bytes += static_cast<std::uint64_t>(count);
  }
  result.sha256 = digest.finish();
  return result;
}

}  // namespace specrt::native
