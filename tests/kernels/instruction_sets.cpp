// Holds the kernels of every instruction set that the processor has to the bits of the reference.
//
// Each buffer ends where a page ends that nothing follows, so that a read or write after it ends
// the program. Prints the names of those that passed, or the first difference.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/kernels.hpp"

namespace {

using namespace specrt::kernels;
using std::size_t;

constexpr size_t kWidest = 40;

template <class Number>
class Buffer {
 public:
  explicit Buffer(size_t count) : count_(count) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t bytes = (count * sizeof(Number) + page - 1) / page * page;
    size_ = bytes + page;
    memory_ = static_cast<char*>(
        mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (memory_ == MAP_FAILED || mprotect(memory_ + bytes, page, PROT_NONE) != 0) std::abort();
    first_ = reinterpret_cast<Number*>(memory_ + bytes) - count;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { munmap(memory_, size_); }

  void fill(Number value) {
    for (size_t i = 0; i < count_; i++) first_[i] = value;
  }
  void copy(const Buffer& from) { std::memcpy(first_, from.first_, count_ * sizeof(Number)); }
  Number* data() const { return first_; }
  size_t size() const { return count_; }
  Number& operator[](size_t index) const { return first_[index]; }

 private:
  size_t count_, size_ = 0;
  char* memory_ = nullptr;
  Number* first_ = nullptr;
};

// Numbers that are the same on every machine: a linear congruential generator.
class Random {
 public:
  explicit Random(std::uint64_t seed = 1) : state_(seed) {}
  std::uint32_t bits() {
    state_ = state_ * 6364136223846793005U + 1442695040888963407U;
    return static_cast<std::uint32_t>(state_ >> 33);
  }
  size_t below(size_t limit) { return bits() % limit; }
  float between(float low, float high) {
    return low + (high - low) * (static_cast<float>(bits() >> 7) * 0x1p-24F);
  }

 private:
  std::uint64_t state_;
};

bool same(float a, float b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b));
}

[[noreturn]] void differ(const std::string& what, size_t index, double found, double expected) {
  std::printf("%s: number %zu is %.9g; the reference has %.9g\n", what.c_str(), index, found,
              expected);
  std::exit(1);
}

// FNV-1a over all that was compared: a processor of another kind must come to the same.
std::uint64_t digest;

void add_to_digest(float number) {
  std::uint32_t bits = 0x7FC00000;  // any number that is none
  if (!std::isnan(number)) std::memcpy(&bits, &number, sizeof bits);
  digest = (digest ^ bits) * 0x100000001B3;
}

template <class Number>
void compare(const std::string& what, const Number* found, const Number* expected, size_t count) {
  for (size_t i = 0; i < count; i++) add_to_digest(static_cast<float>(found[i]));
  if (count == 0 || std::memcmp(found, expected, count * sizeof *found) == 0) return;
  for (size_t i = 0; i < count; i++)
    if (!same(static_cast<float>(found[i]), static_cast<float>(expected[i])))
      differ(what, i, static_cast<double>(found[i]), static_cast<double>(expected[i]));
}

struct Product {
  Format format;
  size_t outputs, inputs, block, scale_bytes;
  Offset offset = Offset::none;
};

constexpr Product kProducts[] = {
    {Format::int4, 96, 256, 32, 2},
    {Format::int4, 40, 384, 128, 2},
    {Format::int4, 7, 64, 16, 4},
    {Format::int4, 80, 96, 96, 2},
    {Format::int4, 130, 192, 64, 4},
    {Format::int8, 96, 256, 64, 2},
    {Format::int8, 33, 128, 32, 4},
    {Format::int8, 16, 48, 16, 2},
    {Format::int8, 72, 2560, 2560, 4},
    {Format::int8, 50, 384, 128, 2},
    {Format::bf16, 48, 100, 0, 0},
    {Format::fp16, 50, 65, 0, 0},
    {Format::fp32, 97, 33, 0, 0},
    {Format::fp4, 96, 256, 32, 2},
    {Format::fp4, 40, 64, 16, 4},
    {Format::fp8, 96, 256, 128, 2},
    {Format::fp8, 50, 48, 48, 4},
    {Format::int4, 96, 256, 32, 2, Offset::zeros},
    {Format::int4, 40, 384, 384, 4, Offset::zeros},
    {Format::int8, 33, 128, 32, 2, Offset::zeros},
    {Format::int8, 72, 1024, 512, 4, Offset::zeros},
    {Format::int4, 96, 256, 32, 2, Offset::minimums},
    {Format::int4, 7, 64, 16, 4, Offset::minimums},
    {Format::int8, 50, 384, 128, 2, Offset::minimums},
};
constexpr const char* kFormats[] = {"int4", "int8", "fp4", "fp8", "bf16", "fp16", "fp32"};
constexpr const char* kOffsets[] = {"", "-zeros", "-minimums"};

// Rows from tiny to huge; one of zeros in places, and one each with an infinity and with what is no
// number.
void fill_rows(Random& random, const Buffer<float>& x, size_t inputs) {
  for (size_t row = 0; row < kWidest; row++) {
    const float most = std::pow(10.0F, static_cast<float>(random.below(12)) - 7.0F);
    for (size_t i = 0; i < inputs; i++) x[row * inputs + i] = random.between(-most, most);
  }
  for (size_t i = 0; i < inputs / 2; i++) x[i] = 0;
  x[3 * inputs + 5] = HUGE_VALF;
  x[9 * inputs + inputs - 1] = std::nanf("");
  x[17 * inputs] = -1e-38F;
}

// Fill the codes of weights with all there are, floats with numbers of all sizes.
void fill_weights(Random& random, const Weights& weights, std::uint8_t* values, size_t size) {
  for (size_t i = 0; i < size; i++) values[i] = static_cast<std::uint8_t>(random.bits());
  if (weights.block > 0) return;  // their scales are filled later
  if (weights.format == Format::fp32) {
    for (size_t i = 0; i < size / 4; i++) {
      const float value = random.between(-1, 1);
      std::memcpy(values + 4 * i, &value, 4);
    }
  } else {
    // The exponent's upper bits are not all ones, so that sums are finite.
    for (size_t i = 1; i < size; i += 2) values[i] = static_cast<std::uint8_t>(values[i] & 0xbf);
  }
}

struct Rows {
  Rows(size_t rows, size_t inputs, size_t block)
      : codes(rows * inputs),
        scales(rows * (inputs / block)),
        sums(scales.size()),
        totals(scales.size()) {}
  QuantizedRows all() const { return {codes.data(), scales.data(), sums.data(), totals.data()}; }
  Buffer<std::int8_t> codes;
  Buffer<float> scales;
  Buffer<std::int32_t> sums;
  Buffer<float> totals;
};

void check_product(const Kernels& kernels, const Kernels& reference, const Product& product,
                   Activation activation, bool has_bias) {
  Random random;
  const size_t pairs = activation == Activation::none ? 1 : 2;
  const size_t tiles = (product.outputs + kTile - 1) / kTile * pairs;
  Weights weights{product.format, product.outputs * pairs, product.inputs, product.block,
                  tiles,          product.scale_bytes,     nullptr,        product.offset};
  const Buffer<std::uint8_t> values(tiles * weights.tile_bytes());
  fill_weights(random, weights, values.data(), values.size());
  const size_t blocks = product.block > 0 ? product.inputs / product.block : 0;
  const size_t scales_of_all = tiles * blocks * kTile;
  const bool has_minimums = product.offset == Offset::minimums;
  for (size_t i = 0; i < scales_of_all * (has_minimums ? 2 : 1); i++) {
    const size_t tile = i / kTile % tiles;
    std::uint8_t* scales = values.data() + weights.strip_scales(tile, i / kTile / tiles % blocks);
    if (i >= scales_of_all) scales += weights.strip_tiles(tile) * kTile * product.scale_bytes;
    const size_t place = tile % kStrip * kTile + i % kTile;
    const float wide = random.between(-0.1F, 0.1F);
    // fp16 from 2^-24 to 1 of both signs: the upper two bits of the exponent are not both ones.
    const auto half = static_cast<std::uint16_t>(random.bits() & 0xbbff);
    if (product.scale_bytes == 4)
      std::memcpy(scales + 4 * place, &wide, 4);
    else
      std::memcpy(scales + 2 * place, &half, 2);
  }
  weights.values = values.data();
  const Buffer<float> x(kWidest * product.inputs), bias(tiles * kTile);
  fill_rows(random, x, product.inputs);
  for (size_t i = 0; i < bias.size(); i++) bias[i] = random.between(-1, 1);
  std::string what = std::string(kernels.name) + " " + kFormats[static_cast<int>(product.format)] +
                     kOffsets[static_cast<int>(product.offset)] + " [" +
                     std::to_string(product.outputs) + ", " + std::to_string(product.inputs) +
                     "] in blocks of " + std::to_string(product.block) + ", activation " +
                     std::to_string(static_cast<int>(activation));

  const bool is_coded = weights.has_codes();
  const size_t block = is_coded ? product.block : product.inputs;
  Rows expected_rows(is_coded ? kWidest : 0, product.inputs, block);
  Buffer<float> expected(kWidest * product.outputs);
  const Output whole{expected.data(), product.outputs, has_bias ? bias.data() : nullptr,
                     activation};
  if (is_coded) {
    reference.quantize(x.data(), kWidest, product.inputs, block, expected_rows.all());
    reference.multiply(weights, expected_rows.all(), kWidest, 0, tiles, whole);
  } else {
    reference.multiply_floats(weights, x.data(), kWidest, 0, tiles, whole);
  }

  const size_t apart = &kernels == &reference ? 9 : 1;  // which takes rows one at a time
  for (size_t width = 0; width <= kWidest; width += apart) {
    const size_t from = width < 24 ? kWidest - width : 0;  // short passes are of other rows
    const Buffer<float> part(width * product.inputs);
    std::memcpy(part.data(), x.data() + from * product.inputs, part.size() * sizeof(float));
    const Rows rows(is_coded ? width : 0, product.inputs, block);
    const size_t stride = product.outputs + width % 3;
    Buffer<float> y(width * stride);
    y.fill(-1234.5F);
    const Output output{y.data(), stride, whole.bias, activation};
    // All tiles at once, or some at a time: what the threads of a session do.
    const size_t step = width % 2 == 0 ? tiles : pairs * (1 + random.below(4));
    if (is_coded) kernels.quantize(part.data(), width, product.inputs, block, rows.all());
    for (size_t tile = 0; tile < tiles; tile += step) {
      const size_t last = tile + step < tiles ? tile + step : tiles;
      if (is_coded)
        kernels.multiply(weights, rows.all(), width, tile, last, output);
      else
        kernels.multiply_floats(weights, part.data(), width, tile, last, output);
    }
    const std::string here = what + ", " + std::to_string(width) + " rows";
    if (is_coded) {
      const size_t before = from * product.inputs, count = width * product.inputs;
      compare(here + ", codes", rows.codes.data(), expected_rows.codes.data() + before, count);
      compare(here + ", scales", rows.scales.data(), expected_rows.scales.data() + before / block,
              count / block);
      compare(here + ", sums", rows.sums.data(), expected_rows.sums.data() + before / block,
              count / block);
    }
    for (size_t row = 0; row < width; row++) {
      compare(here + ", row " + std::to_string(from + row), y.data() + row * stride,
              expected.data() + (from + row) * product.outputs, product.outputs);
      for (size_t i = product.outputs; i < stride; i++)
        if (y[row * stride + i] != -1234.5F) differ(here + ", behind", i, y[i], -1234.5);
    }
  }
}

struct Layer {
  size_t rows, heads, kv_heads, size, positions, angles, window;
  float softcap;
  size_t reach = 0;
};

constexpr Layer kLayers[] = {
    {1, 4, 2, 16, 64, 16, 0, 0},    {2, 8, 2, 64, 96, 64, 0, 0},    {3, 4, 4, 24, 64, 8, 10, 0},
    {1, 6, 1, 128, 80, 128, 0, 30}, {2, 2, 1, 40, 48, 0, 17, 5},    {1, 3, 3, 7, 32, 6, 1, 0},
    {1, 40, 1, 32, 32, 32, 0, 0},   {2, 4, 4, 16, 96, 0, 0, 0, 21}, {1, 4, 2, 8, 64, 0, 11, 4, 64},
    {3, 2, 1, 33, 48, 0, 0, 0, 1},
};

struct Memory {
  explicit Memory(const Attention& attention, size_t rows)
      : keys(rows * attention.kv_heads * attention.positions * attention.key_width),
        values(rows * attention.kv_heads * attention.positions * attention.value_stride()) {
    // What was never written is never read, but zeros after a head.
    keys.fill(std::nanf(""));
    values.fill(0);
    for (size_t i = 0; i < values.size(); i++)
      if (i % attention.value_stride() < attention.value_width) values[i] = std::nanf("");
  }
  Buffer<float> keys, values;
};

// Fill all rows by passes of random widths, some of which go back first. The reference gets one
// token at a time, the others some at a time. In one pass of five the last token of a row is not
// finite.
void check_attention(const Kernels& kernels, const Kernels& reference, const Layer& layer,
                     size_t number) {
  Random random;
  Attention attention{layer.heads,     layer.kv_heads,
                      layer.size,      layer.size,
                      layer.positions, layer.angles,
                      layer.window,    1.0F / std::sqrt(static_cast<float>(layer.size)),
                      layer.softcap,   nullptr,
                      nullptr,         nullptr,
                      nullptr,         nullptr,
                      layer.reach};
  Buffer<float> cosines(layer.positions * (layer.angles / 2)), sines(cosines.size());
  for (size_t i = 0; i < cosines.size(); i++) {
    const float angle = random.between(-3, 3);
    cosines[i] = std::cos(angle), sines[i] = std::sin(angle);
  }
  attention.cosines = cosines.data(), attention.sines = sines.data();
  const Buffer<float> biases(layer.heads * layer.reach);
  for (size_t i = 0; i < biases.size(); i++) biases[i] = random.between(-4, 4);
  if (layer.reach > 0) attention.biases = biases.data();
  const Memory found(attention, layer.rows), expected(attention, layer.rows);
  std::vector<size_t> lengths(layer.rows);
  const size_t wide = layer.heads * layer.size, narrow = layer.kv_heads * layer.size;
  for (size_t pass = 0; pass < 200; pass++) {
    std::vector<std::int64_t> rows, positions;
    for (size_t row = 0; row < layer.rows; row++) {
      size_t& length = lengths[row];
      const size_t back = random.below(3), room = random.below(14);
      if (length == layer.positions) length = 0;
      length -= back < length ? back : length;
      for (size_t i = 0; i < room && length < layer.positions; i++) {
        rows.push_back(static_cast<std::int64_t>(row));
        positions.push_back(static_cast<std::int64_t>(length++));
      }
    }
    const size_t count = rows.size(), all = wide + 2 * narrow;
    const Buffer<float> numbers(count * all);
    for (size_t i = 0; i < numbers.size(); i++) numbers[i] = random.between(-3, 3);
    if (count > 0 && pass % 5 == 4) {
      float* last = numbers.data() + (count - 1) * all;
      for (size_t i = wide; i < all; i++) last[i] = i % 2 == 0 ? HUGE_VALF : std::nanf("");
      lengths[static_cast<size_t>(rows.back())]--;  // the next pass writes there before it reads
    }
    Tokens tokens{rows.data(),
                  positions.data(),
                  nullptr,
                  0,
                  numbers.data(),
                  numbers.data() + wide,
                  numbers.data() + wide + narrow,
                  all,
                  all,
                  all};
    Buffer<float> y(count * wide), true_y(count * wide);
    attention.keys = expected.keys.data(), attention.values = expected.values.data();
    for (size_t token = 0; token < count; token++) {
      reference.append(attention, tokens, token);
      const Buffer<float> scratch(
          attend_floats(attention, 1, static_cast<size_t>(positions[token])));
      for (size_t head = 0; head < layer.kv_heads; head++)
        reference.attend(attention, tokens, token, 1, head, scratch.data(), true_y.data());
    }
    attention.keys = found.keys.data(), attention.values = found.values.data();
    for (size_t token = 0; token < count; token++) kernels.append(attention, tokens, token);
    for (size_t first = 0; first < count;) {
      const size_t most = 1 + random.below(12);
      size_t end = first + 1;
      while (end < count && end - first < most && rows[end] == rows[first]) end++;
      const Buffer<float> scratch(
          attend_floats(attention, end - first, static_cast<size_t>(positions[end - 1])));
      for (size_t head = 0; head < layer.kv_heads; head++)
        kernels.attend(attention, tokens, first, end - first, head, scratch.data(), y.data());
      first = end;
    }
    const std::string what = std::string(kernels.name) + " attention " + std::to_string(number) +
                             ", pass " + std::to_string(pass);
    compare(what, y.data(), true_y.data(), y.size());
    compare(what + ", keys", found.keys.data(), expected.keys.data(), found.keys.size());
    compare(what + ", values", found.values.data(), expected.values.data(), found.values.size());
  }
}

// Tokens of several rows that all stand at the last key of their row, of lengths of all kinds, keys
// after which are not numbers: cross attention. The reference gets one token at a time.
void check_cross(const Kernels& kernels, const Kernels& reference, const Layer& layer,
                 size_t number) {
  Random random;
  Attention attention{};
  attention.heads = layer.heads, attention.kv_heads = layer.kv_heads;
  attention.key_width = attention.value_width = layer.size, attention.positions = layer.positions;
  attention.scale = 1, attention.softcap = layer.softcap;
  const Memory memory(attention, layer.rows);
  attention.keys = memory.keys.data(), attention.values = memory.values.data();
  const size_t wide = layer.heads * layer.size, stride = attention.value_stride();
  for (size_t pass = 0; pass < 60; pass++) {
    std::vector<std::int64_t> rows, positions;
    for (size_t row = 0; row < layer.rows; row++) {
      const size_t length = 1 + random.below(layer.positions), tokens = random.below(14);
      for (size_t head = 0; head < layer.kv_heads; head++)
        for (size_t at = 0; at < layer.positions; at++)
          for (size_t i = 0; i < layer.size; i++) {
            const size_t place = attention.kv_offset(row, head) + at;
            const bool is_seen = at < length;
            attention.keys[(place - at % kTile) * layer.size + i * kTile + at % kTile] =
                is_seen ? random.between(-1, 1) : std::nanf("");
            attention.values[place * stride + i] = is_seen ? random.between(-1, 1) : HUGE_VALF;
          }
      rows.insert(rows.end(), tokens, static_cast<std::int64_t>(row));
      positions.insert(positions.end(), tokens, static_cast<std::int64_t>(length - 1));
    }
    const size_t count = rows.size();
    const Buffer<float> queries(count * wide);
    for (size_t i = 0; i < queries.size(); i++) queries[i] = random.between(-1, 1);
    Tokens tokens{};
    tokens.rows = rows.data(), tokens.positions = positions.data();
    tokens.queries = queries.data(), tokens.query_stride = wide;
    const Buffer<float> y(count * wide), true_y(count * wide);
    for (size_t first = 0, end = 0; first < count; first = end) {
      const size_t most = 1 + random.below(12);
      for (end = first + 1; end < count && end - first < most && rows[end] == rows[first];) end++;
      const auto last = static_cast<size_t>(positions[first]);
      const Buffer<float> scratch(attend_floats(attention, end - first, last));
      for (size_t head = 0; head < layer.kv_heads; head++) {
        kernels.attend(attention, tokens, first, end - first, head, scratch.data(), y.data());
        for (size_t token = first; token < end; token++)
          reference.attend(attention, tokens, token, 1, head, scratch.data(), true_y.data());
      }
    }
    compare(std::string(kernels.name) + " cross attention " + std::to_string(number) + ", pass " +
                std::to_string(pass),
            y.data(), true_y.data(), y.size());
    for (size_t i = 0; i < y.size(); i++)
      if (!std::isfinite(y[i])) differ("cross attention past a length", i, y[i], 0);
  }
}

struct Recurrent {
  size_t heads, key_heads, key_size, value_size;
  bool is_delta;
  float epsilon;
};

constexpr Recurrent kRecurrents[] = {
    {4, 2, 16, 32, true, 1e-6F},  {6, 2, 24, 40, true, 0},      {4, 4, 7, 5, false, 0},
    {2, 1, 128, 64, true, 1e-6F}, {3, 1, 33, 50, false, 1e-6F}, {17, 1, 1, 1, true, 0},
};

// A text of a layer with a recurrent state, and its memory, of which nothing is written yet.
struct RecurrentText {
  static constexpr size_t kLength = 100;

  explicit RecurrentText(const Recurrence& layer)
      : recurrence(layer),
        state(layer.state_floats()),
        factors(layer.positions * layer.factors_stride()),
        y(kLength * layer.heads * layer.value_size) {
    state.fill(std::nanf("")), factors.fill(std::nanf(""));
    recurrence.state = state.data(), recurrence.factors = factors.data();
  }

  // Read some tokens. A number of a token is one of its place, and of a spoilt one, the last, none.
  void read(const Kernels& kernels, const RecurrentRow& row, bool is_spoilt) {
    const size_t heads = recurrence.heads, keys = recurrence.key_heads * recurrence.key_size;
    const size_t values = heads * recurrence.value_size, count = row.count;
    const Buffer<float> query(count * keys), key(count * keys), value(count * values);
    const Buffer<float> decay(count * heads), beta(count * heads), own_y(count * values);
    const Buffer<float> prepared(count * recurrence.prepared_size());
    const Buffer<float> scratch(recur_floats(recurrence));
    size_t kind = 0;
    for (const Buffer<float>* input : {&query, &key, &value, &decay, &beta}) {
      const size_t size = input->size() / count;
      for (size_t token = 0; token < count; token++) {
        Random random(8 * (row.start + token) + kind);
        for (size_t i = 0; i < size; i++)
          (*input)[token * size + i] = kind == 3 ? random.between(-1, 0) : random.between(-1, 1);
      }
      for (size_t i = 0; is_spoilt && i < size; i++)
        (*input)[(count - 1) * size + i] = i % 3 == 0 ? std::nanf("") : HUGE_VALF;
      kind++;
    }
    const Steps steps{query.data(), key.data(),      value.data(), decay.data(),
                      beta.data(),  prepared.data(), own_y.data()};
    for (size_t token = 0; token < count; token++) kernels.prepare(recurrence, steps, token);
    for (size_t head = 0; head < heads; head++)
      kernels.recur(recurrence, steps, row, head, scratch.data());
    for (size_t token = 0; token < count; token++) keep_factors(recurrence, steps, row, token);
    std::memcpy(y.data() + row.start * values, own_y.data(), own_y.size() * sizeof(float));
  }

  Recurrence recurrence;
  Buffer<float> state, factors, y;
};

// Passes of random widths, of which some tokens are taken back, those that are not finite too. The
// reference reads one token at a time, and adds it to its state at once.
void check_recurrence(const Kernels& kernels, const Kernels& reference, const Recurrent& layer,
                      size_t number) {
  Random random;
  constexpr size_t ring = 16, length = RecurrentText::kLength;
  const Recurrence recurrence{
      layer.heads, layer.key_heads, layer.key_size, layer.value_size, ring,
      0.5F,        layer.epsilon,   layer.is_delta, nullptr,          nullptr};
  RecurrentText expected(recurrence);
  for (size_t at = 0; at < length; at++) expected.read(reference, {0, 0, 1, at, at, at + 1}, false);
  for (size_t round = 0; round < 12; round++) {
    RecurrentText found(recurrence);
    for (size_t start = 0, base = 0; start < length;) {
      const size_t most = random.below(4) == 0 ? 40 : 9, left = length - start;
      const size_t room = 1 + random.below(most), count = room < left ? room : left;
      const size_t end = start + count, lowest = base + ring > end ? base : end - ring;
      const bool is_spoilt = count > 1 && random.below(5) == 0;
      const size_t good = is_spoilt ? end - 1 : end;
      const size_t next = good == length ? end : lowest + random.below(good - lowest + 1);
      found.read(kernels, {0, 0, count, start, base, next}, is_spoilt);
      const size_t kept = next > start ? next : start;
      start = kept + random.below(good - kept + 1), base = next;
    }
    const std::string what = std::string(kernels.name) + " recurrence " + std::to_string(number) +
                             ", round " + std::to_string(round);
    compare(what, found.y.data(), expected.y.data(), found.y.size());
    compare(what + ", state", found.state.data(), expected.state.data(), found.state.size());
    compare(what + ", ring", found.factors.data(), expected.factors.data(), found.factors.size());
    for (size_t i = 0; i < found.y.size(); i++)
      if (!std::isfinite(found.y[i])) differ(what + ", what was taken back", i, found.y[i], 0);
  }
}

constexpr size_t kSizes[] = {1, 15, 16, 17, 33, 80, 1024, 1031, 2500};

// Rows of all sizes and lengths, with a residual, a bias and the sum in turns; one that is not
// finite. The reference gets one row at a time.
void check_norms(const Kernels& kernels, const Kernels& reference) {
  Random random;
  constexpr size_t rows = 7;
  for (const size_t inputs : kSizes)
    for (int kind = 0; kind < 16; kind++) {
      const Buffer<float> x(rows * inputs), residual(rows * inputs), weight(inputs), bias(inputs);
      for (size_t i = 0; i < x.size(); i++) x[i] = random.between(-9, 9);
      for (size_t i = 0; i < x.size(); i++) residual[i] = random.between(-3, 3);
      for (size_t i = 0; i < inputs; i++) weight[i] = random.between(-2, 2);
      for (size_t i = 0; i < inputs; i++) bias[i] = random.between(-1, 1);
      for (size_t i = 0; i < inputs; i++) x[2 * inputs + i] *= 1e-30F;
      x[4 * inputs + inputs / 2] = kind % 2 == 0 ? std::nanf("") : HUGE_VALF;
      Buffer<float> sum(rows * inputs), y(rows * inputs), true_sum(inputs), true_y(inputs);
      sum.fill(-1234.5F), true_sum.fill(-1234.5F);
      Norm norm{(kind & 1) != 0 ? residual.data() : nullptr,
                weight.data(),
                (kind & 2) != 0 ? bias.data() : nullptr,
                1e-5F,
                (kind & 4) != 0,
                (kind & 8) != 0 ? sum.data() : nullptr};
      kernels.normalize(norm, x.data(), rows, inputs, y.data());
      const std::string what = std::string(kernels.name) + " norm " + std::to_string(kind) +
                               " of " + std::to_string(inputs);
      for (size_t row = 0; row < rows; row++) {
        const size_t at = row * inputs;
        if (norm.residual != nullptr) norm.residual = residual.data() + at;
        if (norm.sum != nullptr) norm.sum = true_sum.data();
        reference.normalize(norm, x.data() + at, 1, inputs, true_y.data());
        compare(what + ", row " + std::to_string(row), y.data() + at, true_y.data(), inputs);
        compare(what + ", sum " + std::to_string(row), sum.data() + at, true_sum.data(), inputs);
      }
    }
}

void check_sums(const Kernels& kernels, const Kernels& reference) {
  Random random;
  for (const size_t width : kSizes) {
    constexpr size_t rows = 5;
    const Buffer<float> parts(rows * width), y(width), true_y(width);
    for (size_t i = 0; i < rows * width; i++) parts[i] = random.between(-10, 10);
    parts[width / 2] = HUGE_VALF;
    const size_t places[] = {3, 1, 3, 0};
    const float weights[] = {0.3F, random.between(-1, 1), 0, 1e-20F};
    for (const size_t count : {size_t{0}, size_t{1}, size_t{4}}) {
      kernels.add_rows(parts.data(), places, weights, count, width, y.data());
      reference.add_rows(parts.data(), places, weights, count, width, true_y.data());
      compare(std::string(kernels.name) + " sums of " + std::to_string(width), y.data(),
              true_y.data(), width);
    }
  }
}

// Rows with ties, of numbers of both infinities, of none; and with the largest in every place.
void check_scores(const Kernels& kernels, const Kernels& reference) {
  Random random;
  for (const size_t count : kSizes)
    for (size_t round = 0; round < 60; round++) {
      const Buffer<float> logits(count);
      const float most = round % 3 == 0 ? 1 : round % 3 == 1 ? 30 : 3e38F;
      for (size_t i = 0; i < count; i++) logits[i] = random.between(-most, most);
      if (round % 5 == 1)
        for (size_t i = 0; i < count; i++) logits[i] = static_cast<float>(random.below(3)) - 1;
      if (round % 5 == 2)
        for (size_t i = 0; i < count; i++)
          if (random.below(2) == 0) logits[i] = -HUGE_VALF;
      if (round % 7 == 3) logits[random.below(count)] = std::nanf("");
      if (round % 7 == 4) logits[random.below(count)] = HUGE_VALF;
      if (round % 7 == 5) logits[random.below(count)] = most;
      if (round % 30 == 29)
        for (size_t i = 0; i < count; i++) logits[i] = -HUGE_VALF;
      std::int64_t best = 0, true_best = 0, alone = 0;
      float share = 0, true_share = 0;
      kernels.score(logits.data(), count, &best, &share);
      kernels.score(logits.data(), count, &alone, nullptr);
      reference.score(logits.data(), count, &true_best, &true_share);
      const std::string what = std::string(kernels.name) + " scores of " + std::to_string(count) +
                               ", round " + std::to_string(round);
      compare(what + ", best", &best, &true_best, 1);
      compare(what + ", best without a share", &alone, &true_best, 1);
      compare(what + ", share", &share, &true_share, 1);
    }
}

void check(const Kernels& kernels) {
  const Kernels& reference = *find_kernels("scalar");
  digest = 0xCBF29CE484222325;
  check_norms(kernels, reference);
  check_sums(kernels, reference);
  check_scores(kernels, reference);
  for (const Product& product : kProducts) {
    check_product(kernels, reference, product, Activation::none, true);
    check_product(kernels, reference, product, Activation::silu, false);
    check_product(kernels, reference, product, Activation::gelu, true);
  }
  size_t number = 0;
  for (const Layer& layer : kLayers) {
    check_attention(kernels, reference, layer, number);
    check_cross(kernels, reference, layer, number++);
  }
  number = 0;
  for (const Recurrent& layer : kRecurrents) check_recurrence(kernels, reference, layer, number++);
  std::printf("%s %016llx\n", kernels.name, static_cast<unsigned long long>(digest));
  std::fflush(stdout);
}

}  // namespace

#if defined(__x86_64__)
namespace specrt::kernels {
extern const Kernels kEmulatedAmx;
}
#endif

int main() {
  for (const Kernels* const* entry = all_kernels(); *entry != nullptr; entry++)
    if ((*entry)->supported()) check(**entry);
#if defined(__x86_64__)
  if (find_kernels("avx512-vnni") != nullptr) check(kEmulatedAmx);
#endif
  return 0;
}
