#include "native/sha256.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

#include "native/sha256_block.hpp"

namespace specrt::native {

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
  std::string found;
  for (const std::uint32_t word : state_)
    for (int shift = 28; shift >= 0; shift -= 4) found += kHex[word >> shift & 15];
  return found;
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

}  // namespace

HashedFile hash_file(const std::string& path) {
  const Descriptor file(path);
  Sha256 digest;
  HashedFile found;
  std::vector<unsigned char> piece(1 << 18);
  while (true) {
    const ssize_t count = read(file.number, piece.data(), piece.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw std::system_error(errno, std::generic_category());
    if (count == 0) break;
    digest.update(piece.data(), static_cast<std::size_t>(count));
    found.bytes += static_cast<std::uint64_t>(count);
  }
  found.sha256 = digest.finish();
  return found;
}

}  // namespace specrt::native
