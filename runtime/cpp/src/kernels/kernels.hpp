// Kernels for narrow passes: products of few rows with weights that are stored once, in tiles.
//
// Every number that a row comes to depends on that row and the weights alone: not on the rows
// next to it, on the number of threads, nor on the instruction set. Sums of codes are whole
// numbers; sums of floats run in one order, with one rounding a multiply-add. So all kernels give
// the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace specrt::kernels {

// Outputs of a tile: 32-bit lanes of the widest vector.
constexpr std::size_t kTile = 16;
// Inputs of a group: what one multiply-add instruction of bytes sums in each lane.
constexpr std::size_t kGroup = 4;
// Tiles that lie side by side: what one row multiplies with at a time.
constexpr std::size_t kStrip = 4;

// How graphs and weights are made, as manifests name it. LAYOUT of Python is the same.
constexpr char kLayout[] = "strips of 4 tiles of 16, norms in products, cross attention";
// Of before there was cross attention: what was made for it is read as it is.
constexpr char kEarlierLayout[] = "strips of 4 tiles of 16, norms in products";

// Inputs of the largest block: sums of 65,536 products of a byte and a code, and what they start
// at, stay below 2^31. Each is rounded to a float once, where it takes more than 24 bits: on all
// processors to the nearest one, halves to even.
constexpr std::size_t kMostBlock = 65536;

enum class Format { int4, int8, fp4, fp8, bf16, fp16, fp32 };

// What is taken off the weights of a block next to their scale.
enum class Offset { none, zeros, minimums };

enum class Activation { none, silu, gelu };

// Weights [outputs, inputs] in tiles of 16 outputs, four side by side in a strip; the last strip
// has the tiles that are left. Outputs beyond the last one are zeros. A strip is read from its
// begin to its end:
//
//   codes   [inputs / block] times
//             [block / step][tiles of the strip][16 outputs][4 inputs], a step of 4 inputs of int8
//               or 8 of int4 and fp4
//             [tiles of the strip][16 outputs], the scales of these, fp16 or fp32
//             [tiles of the strip][16 outputs], their zeros or minimums, where they have any
//   fp8     [inputs / block] times
//             [block][tiles of the strip][16 outputs]
//             [tiles of the strip][16 outputs], the scales of these, fp16 or fp32
//   floats  [inputs][tiles of the strip][16 outputs]
//
// int8 is 128 more than the code. int4 are two to a byte and 8 more than the code: the low half is
// input 8 g + i, the high half input 8 g + 4 + i. With zeros they are what the zero is taken off:
// scale * (code - zero). Zeros are bytes; those of two blocks of int4 lie after the first one, two
// to a byte, its own in the low halves: so that vectors of codes never lie in two lines of a cache.
// With minimums, floats as wide as the scales, codes are as they are, from 0:
// scale * code - minimum. fp4 lie as int4 and are indices of kValues. fp8 is E4M3.
struct Weights {
  Format format;
  std::size_t outputs;
  std::size_t inputs;
  // Inputs that share a scale, a multiple of 16 and at most kMostBlock; 0 for floats.
  std::size_t block;
  std::size_t tiles;        // of all outputs
  std::size_t scale_bytes;  // of each scale: 2 or 4; 0 for floats
  const std::uint8_t* values;
  Offset offset = Offset::none;

  bool has_codes() const {
    return format == Format::int4 || format == Format::int8 || format == Format::fp4;
  }
  // Bytes of a tile without scales, for some inputs.
  std::size_t value_bytes(std::size_t some) const {
    if (format == Format::int4 || format == Format::fp4) return kTile * some / 2;
    if (format == Format::int8 || format == Format::fp8) return kTile * some;
    return kTile * some * (format == Format::fp32 ? 4 : 2);
  }
  // Bytes of the zeros or minimums of a tile that lie after a block.
  std::size_t offset_bytes(std::size_t index) const {
    if (offset == Offset::none) return 0;
    if (offset == Offset::minimums) return kTile * scale_bytes;
    return format == Format::int4 && index % 2 != 0 ? 0 : kTile;
  }
  // Bytes of a tile next to the values of the first blocks.
  std::size_t beside_bytes(std::size_t blocks) const {
    const bool are_halves = offset == Offset::zeros && format == Format::int4;
    return blocks * kTile * scale_bytes +
           (are_halves ? (blocks + 1) / 2 : blocks) * offset_bytes(0);
  }
  // How far the zeros of a block lie after its scales; those of an odd one of int4 lie before it.
  std::ptrdiff_t zeros_at(std::size_t tile, std::size_t index) const {
    const auto strip = static_cast<std::ptrdiff_t>(strip_tiles(tile));
    const auto scales = static_cast<std::ptrdiff_t>(kTile * scale_bytes);
    const auto side = static_cast<std::ptrdiff_t>(tile % kStrip * kTile);
    if (offset_bytes(index) > 0) return strip * scales + side;
    return side - strip * static_cast<std::ptrdiff_t>(value_bytes(block) + kTile);
  }
  // What zeros are shifted by.
  int zero_shift(std::size_t index) const { return offset_bytes(index) > 0 ? 0 : 4; }
  // Bytes of a tile.
  std::size_t tile_bytes() const {
    const std::size_t blocks = block > 0 ? inputs / block : 0;
    return value_bytes(inputs) + beside_bytes(blocks);
  }
  // Tiles of the strip that a tile is in.
  std::size_t strip_tiles(std::size_t tile) const {
    const std::size_t left = tiles - tile / kStrip * kStrip;
    return left < kStrip ? left : kStrip;
  }
  // Where the values of an input begin in a strip, the first one of a block.
  std::size_t strip_values(std::size_t tile, std::size_t input) const {
    const std::size_t before = block > 0 ? beside_bytes(input / block) : 0;
    return tile / kStrip * kStrip * tile_bytes() +
           strip_tiles(tile) * (value_bytes(input) + before);
  }
  // Where the scales of a block begin.
  std::size_t strip_scales(std::size_t tile, std::size_t index) const {
    return strip_values(tile, index * block) + strip_tiles(tile) * value_bytes(block);
  }
};

// Twice what the codes of fp4 stand for (E2M1), and 12 more.
constexpr std::uint8_t kValues[] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr std::int32_t kMiddle = 12;

// fp8 is widened as if it were fp16, of which it has the exponent's lower bits: 2^-8 of its value.
constexpr float kFp8Raised = 256.0F;

// Rows [rows, inputs] as int8 codes from -127 to 127, each block with a scale of its own.
struct QuantizedRows {
  std::int8_t* codes;  // [rows, inputs]
  float* scales;       // [rows, inputs / block]
  std::int32_t* sums;  // [rows, inputs / block]: of the codes
  float* totals;       // [rows, inputs / block]: -scale * sum
};

// Where products go: y [rows, stride].
struct Output {
  float* y;
  std::size_t stride;
  const float* bias;  // [outputs], or none
  // With an activation, tiles come in pairs of gate and up, and y has activation(gate) * up.
  Activation activation;
};

// A norm of rows [rows, inputs] before they are multiplied.
struct Norm {
  const float* residual;  // added to the rows first, or none
  const float* weight;    // [inputs]
  const float* bias;      // [inputs], or none
  float epsilon;
  bool is_centred;  // LayerNorm, which takes the mean off first; else RMSNorm
  float* sum;       // where rows + residual go, which are then normed; or none
};

// Attention of one layer over the KV buffers of some rows.
struct Attention {
  std::size_t heads, kv_heads;
  std::size_t key_width, value_width;  // numbers of a key, and a query, and of a value
  std::size_t positions;  // that a buffer holds, a multiple of 16: p lies at p % positions
  std::size_t angles;     // of a head that are rotated, in halves; 0: none
  std::size_t window;     // latest positions that are seen; 0: all
  float scale;
  float softcap;  // 0: none

  // Keys of one row and head lie in groups of 16 positions, [positions / 16][key_width][16];
  // values as [positions][value_stride], with zeros after the head.
  float* keys;
  float* values;
  const float* cosines;  // [.., angles / 2]
  const float* sines;

  // What is added to a key's score by how far it lies before the query: [heads][reach], the
  // farthest first, so that keys one after another read one after another. Keys beyond have the
  // first of a head. None: null.
  const float* biases;
  std::size_t reach;

  std::size_t value_stride() const { return (value_width + kTile - 1) / kTile * kTile; }
  // Of scratch memory for a query, and then for a sum of values.
  std::size_t query_stride() const {
    const std::size_t widest = key_width > value_width ? key_width : value_width;
    return (widest + kTile - 1) / kTile * kTile;
  }
  std::size_t kv_offset(std::size_t row, std::size_t head) const {
    return (row * kv_heads + head) * positions;
  }
};

// The tokens of a pass: whose row each is of, and where it stands in it.
struct Tokens {
  const std::int64_t* rows;
  const std::int64_t* positions;
  const std::int64_t* ends;  // after the last position that each sees; none: it sees up to its own
  std::size_t first_query;   // tokens before it have keys and values alone
  // [tokens, stride] each
  const float* queries;
  const float* keys;
  const float* values;
  std::size_t query_stride, key_stride, value_stride;
};

// Values of a panel of a state: two lines of a cache.
constexpr std::size_t kPanel = 2 * kTile;

// A layer with a recurrent state: S = decay * S + key (outer) u for each token and head, of which
// it reads S^T query. u is beta * value, or with the delta rule what beta * (value - decay * S^T
// key) is before.
struct Recurrence {
  std::size_t heads, key_heads;      // heads / key_heads heads share a key and a query
  std::size_t key_size, value_size;  // of a head
  std::size_t positions;             // of the ring: p lies at p % positions
  float scale;                       // of queries
  float epsilon;                     // 0: keys and queries are taken as they are, else divided by
                                     // their lengths, whose squares it is added to
  bool is_delta;

  // The state of one row and head lies in panels of 32 values, [key_size][32]; the last one of
  // 16 where that holds those left.
  float* state;
  // What positions add, [rows][positions][stride]: decays of the heads, keys, u of the heads.
  float* factors;

  std::size_t value_stride() const { return (value_size + kTile - 1) / kTile * kTile; }
  // Where the numbers of a column begin in the state of a head, and how far they lie apart.
  std::size_t column_at(std::size_t column) const {
    return column / kPanel * kPanel * key_size + column % kPanel;
  }
  std::size_t panel_stride(std::size_t column) const {
    const std::size_t left = value_stride() - column / kPanel * kPanel;
    return left < kPanel ? left : kPanel;
  }
  std::size_t factors_stride() const {
    return (values_at() + heads * value_size + kTile - 1) / kTile * kTile;
  }
  // Floats of scratch memory for a token: what the ring takes, queries, and the products of these
  // with the keys.
  std::size_t prepared_size() const { return products_at() + key_heads; }
  std::size_t state_floats() const { return heads * key_size * value_stride(); }  // of a row
  float* state_of(std::size_t row, std::size_t head) const {
    return state + row * state_floats() + head * key_size * value_stride();
  }
  float* factors_of(std::size_t row, std::size_t position) const {
    return factors + (row * positions + position % positions) * factors_stride();
  }
  // Where keys and u lie in what a position adds; and keys, queries and products in what is
  // prepared.
  std::size_t keys_at() const { return heads; }
  std::size_t values_at() const { return heads + key_heads * key_size; }
  std::size_t queries_at() const { return factors_stride(); }
  std::size_t products_at() const { return queries_at() + key_heads * key_size; }
};

// The tokens of a pass, [tokens, ..] each.
struct Steps {
  const float* queries;
  const float* keys;
  const float* values;
  const float* decays;  // their logarithms
  const float* betas;
  float* prepared;
  float* y;
};

// Some tokens of a row, from position `start` on. The state holds the positions before `base`, and
// those before `next_base` afterwards; the ring holds those from `base` to `start`.
struct RecurrentRow {
  std::size_t row, first, count;
  std::size_t start, base, next_base;
};

// What one instruction set does. Rows and tiles are computed alone; callers may split them.
struct Kernels {
  const char* name;
  bool (*supported)();
  // Quantize rows [rows, inputs] by blocks. A block with a number that is not finite has a scale
  // that is not either.
  void (*quantize)(const float* x, std::size_t rows, std::size_t inputs, std::size_t block,
                   const QuantizedRows& result);
  // Multiply with the tiles from `first` to `last`, both even with an activation.
  void (*multiply)(const Weights& weights, const QuantizedRows& x, std::size_t rows,
                   std::size_t first, std::size_t last, const Output& output);
  void (*multiply_floats)(const Weights& weights, const float* x, std::size_t rows,
                          std::size_t first, std::size_t last, const Output& output);
  // Rotate the keys of a token, and put them and its values into the buffers.
  void (*append)(const Attention& attention, const Tokens& tokens, std::size_t token);
  // Attend with some tokens of one row, one after another, in the heads of one KV head; their keys
  // and values are in the buffers. Writes y [queries, heads * value_width]. `scratch` holds
  // attend_floats.
  void (*attend)(const Attention& attention, const Tokens& tokens, std::size_t first,
                 std::size_t count, std::size_t kv_head, float* scratch, float* y);
  // Prepare a token: `recur` reads that.
  void (*prepare)(const Recurrence& recurrence, const Steps& steps, std::size_t token);
  // Run a row through the state of a head. Writes y, and u into what is prepared, which then begins
  // with what the ring takes. `scratch` holds recur_floats.
  void (*recur)(const Recurrence& recurrence, const Steps& steps, const RecurrentRow& row,
                std::size_t head, float* scratch);
  // Norm rows [rows, inputs] into y, which is other memory.
  void (*normalize)(const Norm& norm, const float* x, std::size_t rows, std::size_t inputs,
                    float* y);
  // Add rows of `width`: y is the sum of weights[i] * rows[places[i]], one after another.
  void (*add_rows)(const float* rows, const std::size_t* places, const float* weights,
                   std::size_t count, std::size_t width, float* y);
  // Find the first of the largest of `count` logits, -1 where one is not a number or the largest is
  // infinite; and its share of the softmax where `confidence` is given, no number then.
  void (*score)(const float* logits, std::size_t count, std::int64_t* best, float* confidence);
  // Loops that measure what a machine can do at most; see limits.hpp.
  std::int32_t (*read)(const std::uint8_t* from, std::size_t bytes);
  std::size_t (*multiply_only)(Format format, std::size_t steps, float* result);
};

// Multiply with some tiles as floats: rows are not quantized. Slow, for checks.
void multiply_exactly(const Weights& weights, const float* x, std::size_t rows, std::size_t first,
                      std::size_t last, const Output& output);

// The inputs of one output: a row of a table.
void look_up(const Weights& weights, std::size_t row, float* y);

// Floats of scratch memory that `attend` takes for some tokens that see up to `position`.
std::size_t attend_floats(const Attention& attention, std::size_t count, std::size_t position);

// Floats of scratch memory that `recur` takes.
std::size_t recur_floats(const Recurrence& recurrence);

// Write what a token of a row adds into the ring, once nothing is read there any more.
void keep_factors(const Recurrence& recurrence, const Steps& steps, const RecurrentRow& row,
                  std::size_t token);

// The kernels of an instruction set that this processor has; the best one for an empty name, and
// nullptr for one that is unknown or that it lacks.
const Kernels* find_kernels(const char* name);

// All that this library was compiled with, best first; ends with nullptr.
const Kernels* const* all_kernels();

}  // namespace specrt::kernels
