// The kernels of AMX over tile registers in memory, for machines that have AVX-512 and no AMX.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

// As Intel's manual describes them: instructions on tiles that do not fit together are faults.
struct Tile {
  std::size_t rows, row_bytes;
  std::uint8_t bytes[16][64];
};

thread_local Tile tiles[8];
thread_local bool is_configured = false;

void require(bool is_met) {
  if (!is_met) std::abort();
}

void configure_tiles(const void* from) {
  std::uint8_t read[64];
  std::memcpy(read, from, sizeof read);
  require(read[0] == 1 && read[1] == 0);
  for (int i = 2; i < 16; i++) require(read[i] == 0);
  for (int i = 0; i < 8; i++) {
    tiles[i] = Tile{};
    tiles[i].rows = read[48 + i];
    tiles[i].row_bytes = static_cast<std::size_t>(read[16 + 2 * i] | read[17 + 2 * i] << 8);
    require(tiles[i].rows <= 16 && tiles[i].row_bytes <= 64);
  }
  is_configured = true;
}

void release_tiles() { is_configured = false; }

void zero_tile(int tile) {
  require(is_configured);
  std::memset(tiles[tile].bytes, 0, sizeof tiles[tile].bytes);
}

void load_tile(int tile, const void* from, long stride) {
  zero_tile(tile);
  for (std::size_t row = 0; row < tiles[tile].rows; row++)
    std::memcpy(tiles[tile].bytes[row],
                static_cast<const char*>(from) + static_cast<long>(row) * stride,
                tiles[tile].row_bytes);
}

void store_tile(int tile, void* to, long stride) {
  require(is_configured);
  for (std::size_t row = 0; row < tiles[tile].rows; row++)
    std::memcpy(static_cast<char*>(to) + static_cast<long>(row) * stride, tiles[tile].bytes[row],
                tiles[tile].row_bytes);
}

// Signed bytes of `a` with unsigned ones of `b`, four by four.
void multiply_tiles_of_bytes(int sums, int a, int b) {
  Tile &c = tiles[sums], &left = tiles[a], &right = tiles[b];
  require(is_configured && sums != a && sums != b && a != b && c.rows == left.rows &&
          c.row_bytes == right.row_bytes && left.row_bytes == 4 * right.rows);
  for (std::size_t m = 0; m < c.rows; m++)
    for (std::size_t n = 0; n < c.row_bytes / 4; n++) {
      std::int32_t sum;
      std::memcpy(&sum, c.bytes[m] + 4 * n, 4);
      for (std::size_t k = 0; k < left.row_bytes; k++)
        sum += static_cast<std::int8_t>(left.bytes[m][k]) * right.bytes[k / 4][4 * n + k % 4];
      std::memcpy(c.bytes[m] + 4 * n, &sum, 4);
    }
}

}  // namespace

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#define _tile_loadconfig configure_tiles
#define _tile_release release_tiles
#define _tile_zero zero_tile
#define _tile_loadd load_tile
#define _tile_stored store_tile
#define _tile_dpbsud multiply_tiles_of_bytes
#define kAmx kEmulatedAmx
#include "kernels/amx.cpp"
#endif
