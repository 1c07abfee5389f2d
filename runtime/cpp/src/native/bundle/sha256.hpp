// SHA-256 (FIPS 180-4) of data that comes in pieces.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace specrt::native {

class Sha256 {
 public:
  void update(const void* data, std::size_t bytes);
  // The hash in hexadecimal, after the last update.
  std::string finish();

 private:
  std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> block_{};
  std::size_t held_ = 0;
  std::uint64_t bytes_ = 0;
};

// Which file a path leads to, and when it changed last.
struct FileState {
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::uint64_t bytes = 0;
  std::int64_t modified_ns = 0;
  std::int64_t changed_ns = 0;  // which nobody can set

  bool operator==(const FileState& other) const;
};

// Throws std::system_error where there is no file.
FileState state_of(const std::string& path);

struct HashedFile {
  std::uint64_t bytes = 0;
  std::string sha256;
  FileState state;  // before its first byte was read
};

// Throws std::system_error where the file cannot be read.
HashedFile hash_file(const std::string& path);

// Take so many blocks of 64 bytes into a state of 8 words.
void sha256_blocks(std::uint32_t* state, const unsigned char* data, std::size_t blocks);
// The same in plain C++, for a processor without such instructions.
void sha256_blocks_plain(std::uint32_t* state, const unsigned char* data, std::size_t blocks);

}  // namespace specrt::native
