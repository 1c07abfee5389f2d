// Hashes of files, by every way of computing them.
#include <algorithm>
#include <vector>

#include "native/check.hpp"
#include "native/sha256.hpp"
#include "native/sha256_block.hpp"

namespace specrt::checks {

namespace {

// Without the processor's own instructions, where it has them.
int compare_blocks() {
  std::vector<unsigned char> data(64 * 9);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>(i * 37 + 11);
  std::uint32_t one[8] = {1, 2, 3, 4, 5, 6, 7, 8}, two[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  native::sha256_blocks(one, data.data(), 9);
  native::sha256_blocks_plain(two, data.data(), 9);
  return std::equal(one, one + 8, two) ? 0 : differs("blocks", "two states", "one");
}

int check_sha256(const native::Json& vectors) {
  int wrong = compare_blocks();
  for (const native::Json& file : vectors.at("files").items()) {
    const std::string& path = file.at("path").text();
    const std::string found = native::hash_file(path).sha256;
    const std::string& expected = file.at("sha256").text();
    if (found != expected) wrong += differs(path, found, expected);
  }
  return wrong;
}

}  // namespace

static const Registered kRegistered("sha256", check_sha256);

}  // namespace specrt::checks
