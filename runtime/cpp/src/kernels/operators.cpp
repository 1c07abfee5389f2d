// The operators of domain `specrt`, for ONNX Runtime on a CPU.
//
//   MatMul(x, values (, bias, residual, norm_weight, norm_bias)) -> y (, sum)
//     x [..., K] fp32; bias fp32 [tiles * 16]; y [..., N], or [..., N / 2] with an activation;
//     values [tiles, bytes of a tile] as `Weights` says, with their scales. With a norm,
//     x + residual is normed before it is multiplied; sum [..., K] is x + residual.
//     Attributes: N, K, block_size; format: int4, int8, these with -zeros or -minimums behind, fp4,
//     fp8, bf16, fp16, fp32; activation: none, silu, gelu; exact: 1 multiplies codes with rows that
//     are not quantized; norm: none, rms, layer; epsilon.
//
//   Experts(x, experts, weights, gate_up, down (, gate_up_bias, down_bias)) -> y
//     A mixture of experts, of which each token takes some: x [..., H] fp32; experts [..., slots]
//     int64 names them, and weights [..., slots] says what each counts:
//     y = sum over slots of weights * down(activation(gate(x)) * up(x)), in the order of the slots.
//     gate_up and down are the experts' tiles, in whole strips, as `Weights` says;
//     biases [experts, tiles * 16]. Each expert that a pass names is read once. y has the shape of
//     x.
//     Attributes: experts, H, I (of an expert inside); block_size, format of gate_up;
//     down_block_size, down_format; activation: silu, gelu; exact.
//
//   Scores(logits) -> argmax (, confidence)
//     logits [..., V]; argmax [...] int64, the first of the largest, -1 where one is not a number
//     or the largest is infinite; confidence [...], its share of the softmax, no number then.
//
//   Embedding(tokens, values) -> y
//     tokens [...] int64; y [..., K], the rows of a table; attributes as above.
//
//   Attention(query, key, value, keys, values, rows, positions (, cosines, sines, biases))
//       -> y, keys, values
//     query [1, S, heads * D]; key, value [1, T, kv_heads * D], or all three side by side in query,
//     then S is T; else queries are those of the last S tokens;
//     keys [B, kv_heads, P / 16, D, 16] and values [B, kv_heads, P, D in whole vectors] are KV
//     buffers, changed in place where they are bound to the same memory as outputs; rows [T] and
//     positions [T] say where each token stands; cosines, sines [positions, angles / 2];
//     biases [heads, reach], what a key's score gets by how far it lies before the query, the
//     farthest first, which all beyond have too; y [1, S, heads * D].
//     Attributes: num_heads, kv_num_heads, head_size, scale, softcap, local_window_size;
//     value_size: of a value, where that is not head_size; shared: 1 reads the buffers that an
//     earlier layer has written, its outputs, and neither takes keys and values nor makes buffers;
//     ring: 1 lets position p lie at p % P, and P is window and widest pass at least;
//     bidirectional: 1 lets queries of tokens that follow each other see all of these tokens, and
//     takes no biases; 0, as without it, those before and their own.
//
//   Convolution(x, ring, rows, positions, weight (, bias)) -> y, ring
//     A causal convolution of each channel over the latest inputs of a row: x [1, T, C];
//     weight [taps, C], of the oldest input first; ring [B, 1, P, C in whole vectors], in which the
//     input at position p lies at p % P, changed in place as KV buffers are; bias [C];
//     y [1, T, C]. What lies before a row is zero. Tokens of a row follow each other; what comes
//     before them is read first, and then the latest P of them are written.
//
//   Recurrence(query, key, value, decay, beta, state, factors, base, rows, positions)
//       -> y, state, factors, base
//     A layer whose state S maps a key to a value, in each head: S = exp(decay) * S + key (outer) u
//     for each token, and y = S^T (scale * query). u is beta * value; with the delta rule
//     beta * (value - exp(decay) * S^T key), of S before it.
//     query, key [1, T, key_heads * D]; value [1, T, heads * E]; decay, beta [1, T, heads];
//     state [B, heads, D, E in whole vectors], as panels of 32 values, and of 16 for those left,
//     [D, 32] each, in which S lies up to position base[row];
//     factors [B, 1, P, W], a ring in which lies at p % P what position p adds: exp(decay) of the
//     heads, the keys, u of the heads, in whole vectors; P is a multiple of 16; base [B] int64. All
//     three are changed in place as KV buffers are. A pass of a row adds to S, out of the ring,
//     what lies before its first token, but for the latest `lag` positions, and what the ring
//     cannot hold: what comes after that can be taken back. A row that begins at 0 has base 0 and a
//     state of zeros, whatever memory holds. Tokens of a row follow each other, and rows without a
//     token stay as they are. A pass that the ring holds can be run again.
//     y has the shape of value.
//     Attributes: num_heads, key_heads, key_size, value_size, scale, lag; delta: 1 takes the delta
//     rule; epsilon: above 0, keys and queries are x / sqrt(sum(x * x) + epsilon).
//
//   CrossAttention(query, keys, values, rows, lengths) -> y
//     Every token sees the first lengths[row] of the keys of its row; lengths [B]. The others as
//     above, and keys and values are only read.
//     Attributes: num_heads, kv_num_heads, head_size, scale, softcap.
//
// Work is divided among the threads of the session.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/kernels.hpp"
#include "kernels/onnxruntime.hpp"

namespace specrt::kernels {
namespace {

// The interface that operators call: that of the library that registered them.
const OrtEntries*& ort() {
  static const OrtEntries* entries = nullptr;
  return entries;
}

// What SPECRT_KERNELS names; empty where the best kernels run.
const char* forced() {
  const char* name = std::getenv("SPECRT_KERNELS");
  return name == nullptr ? "" : name;
}

// The kernels that run; none where SPECRT_KERNELS names none that this processor has.
const Kernels* chosen() {
  static const Kernels* const found = find_kernels(forced());
  return found;
}

// The same, in a session: none is opened without kernels.
const Kernels& kernels() { return *chosen(); }

// The names of the instruction sets whose kernels could run here, best first, with a space between.
const std::string& supported() {
  static const std::string names = [] {
    std::string joined;
    for (const Kernels* const* entry = all_kernels(); *entry != nullptr; entry++)
      if ((*entry)->supported())
        joined += (joined.empty() ? "" : " ") + std::string((*entry)->name);
    return joined;
  }();
  return names;
}

void check(OrtStatus* status) {
  if (status == nullptr) return;
  ort()->ReleaseStatus(status);
  throw std::runtime_error("ONNX Runtime refused a call of a specrt operator");
}

std::int64_t integer(const OrtKernelInfo* info, const char* name) {
  std::int64_t value = 0;
  check(ort()->KernelInfoGetAttribute_int64(info, name, &value));
  return value;
}

// An attribute that older graphs do not have; 0 there.
std::int64_t optional_integer(const OrtKernelInfo* info, const char* name) {
  std::int64_t value = 0;
  OrtStatus* status = ort()->KernelInfoGetAttribute_int64(info, name, &value);
  if (status == nullptr) return value;
  ort()->ReleaseStatus(status);
  return 0;
}

// Beyond what attributes count: so the product of three does not overflow.
constexpr std::int64_t kMostCount = 1 << 21;

// An attribute that counts something.
std::size_t size(const OrtKernelInfo* info, const char* name) {
  const std::int64_t value = integer(info, name);
  if (value < 0 || value >= kMostCount)
    throw std::runtime_error("an operator of specrt has " + std::string(name) + " " +
                             std::to_string(value) + "; expected 0 to " +
                             std::to_string(kMostCount - 1));
  return static_cast<std::size_t>(value);
}

std::string text(const OrtKernelInfo* info, const char* name) {
  std::size_t size = 0;
  OrtStatus* status = ort()->KernelInfoGetAttribute_string(info, name, nullptr, &size);
  if (status != nullptr) ort()->ReleaseStatus(status);  // older versions call this an error
  std::string value(size, '\0');
  check(ort()->KernelInfoGetAttribute_string(info, name, value.data(), &size));
  value.resize(std::strlen(value.c_str()));
  return value;
}

float number(const OrtKernelInfo* info, const char* name) {
  float value = 0;
  check(ort()->KernelInfoGetAttribute_float(info, name, &value));
  return value;
}

struct Tensor {
  const void* data;
  std::vector<std::int64_t> shape;
  ONNXTensorElementDataType type;

  std::size_t items() const {
    std::size_t count = 1;
    for (const std::int64_t size : shape) count *= static_cast<std::size_t>(size);
    return count;
  }
};

Tensor input(const OrtKernelContext* context, std::size_t index) {
  const OrtValue* value = nullptr;
  check(ort()->KernelContext_GetInput(context, index, &value));
  if (value == nullptr) return {nullptr, {}, ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED};
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(ort()->GetTensorTypeAndShape(value, &info));
  const std::unique_ptr<OrtTensorTypeAndShapeInfo, void (*)(OrtTensorTypeAndShapeInfo*)> owner(
      info, ort()->ReleaseTensorTypeAndShapeInfo);
  Tensor tensor{};
  check(ort()->GetTensorElementType(info, &tensor.type));
  std::size_t axes = 0;
  check(ort()->GetDimensionsCount(info, &axes));
  tensor.shape.resize(axes);
  check(ort()->GetDimensions(info, tensor.shape.data(), axes));
  void* data = nullptr;
  check(ort()->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  tensor.data = data;
  return tensor;
}

// The memory of an output; none where the graph leaves it out.
void* output(OrtKernelContext* context, std::size_t index, const std::vector<std::int64_t>& shape) {
  OrtValue* value = nullptr;
  check(ort()->KernelContext_GetOutput(context, index, shape.data(), shape.size(), &value));
  if (value == nullptr) return nullptr;
  void* data = nullptr;
  check(ort()->GetTensorMutableData(value, &data));
  return data;
}

float* floats(OrtKernelContext* context, std::size_t index,
              const std::vector<std::int64_t>& shape) {
  return static_cast<float*>(output(context, index, shape));
}

// Run `body(0)` to `body(parts - 1)` on the session's threads; throw what the first of them threw.
template <class Body>
void parallel(const OrtKernelContext* context, std::size_t parts, const Body& body) {
  if (parts == 0) return;
  if (parts == 1) return body(0);
  struct Work {
    const Body& body;
    std::atomic_flag has_failed = ATOMIC_FLAG_INIT;
    std::exception_ptr failure{};
  } work{body};
  const auto run = [](void* data, std::size_t part) {
    auto& own = *static_cast<Work*>(data);
    try {
      own.body(part);
    } catch (...) {  // threads of ONNX Runtime take none
      if (!own.has_failed.test_and_set()) own.failure = std::current_exception();
    }
  };
  check(ort()->KernelContext_ParallelFor(context, run, parts, 0, &work));
  if (work.failure) std::rethrow_exception(work.failure);
}

// Bytes of weights for which another thread is worth waking.
constexpr std::size_t kPartBytes = 128 << 10;
// Rows that one part quantizes.
constexpr std::size_t kPartRows = 16;
// Rows that are quantized before they are multiplied: threads keep the memory for those of the
// longest prompt otherwise. So many multiply longer with a weight than it takes to come from
// memory.
constexpr std::size_t kMostRows = 512;

// Logits for which another thread is worth waking: some 5 us.
constexpr std::size_t kPartScores = 32 << 10;

// Weights as the attributes of an operator and one of its inputs describe them.
class StoredWeights {
 public:
  explicit StoredWeights(const OrtKernelInfo* info)
      : StoredWeights(info, size(info, "N"), size(info, "K"), "") {}

  // Of this size; the names of their attributes begin with `prefix`.
  StoredWeights(const OrtKernelInfo* info, std::size_t outputs, std::size_t inputs,
                const std::string& prefix) {
    weights_.outputs = outputs;
    weights_.inputs = inputs;
    weights_.block = size(info, (prefix + "block_size").c_str());
    const std::string name = text(info, (prefix + "format").c_str());
    const std::size_t dash = name.find('-');
    weights_.format = format(name, name.substr(0, dash));
    if (dash != std::string::npos) weights_.offset = offset(name, name.substr(dash + 1));
    const bool in_blocks = weights_.has_codes() || weights_.format == Format::fp8;
    const std::size_t block = weights_.block;
    if (weights_.outputs == 0 || weights_.inputs == 0 || in_blocks != (block > 0) ||
        (in_blocks && (block % kTile != 0 || block > kMostBlock || weights_.inputs % block != 0)))
      throw std::runtime_error("weights [" + std::to_string(weights_.outputs) + ", " +
                               std::to_string(weights_.inputs) + "] in blocks of " +
                               std::to_string(block) + " are none that specrt multiplies with");
  }

  // With the memory of the input at `index`; `tiles` of them, `times` one after another.
  Weights read(const OrtKernelContext* context, std::size_t index, std::size_t tiles,
               std::size_t times = 1) const {
    const Tensor values = input(context, index);
    Weights weights = weights_;
    weights.values = static_cast<const std::uint8_t*>(values.data);
    weights.tiles = tiles;
    // Their size says whether scales have 2 bytes or 4.
    if (weights.block > 0) weights.scale_bytes = sizeof(std::uint16_t);
    if (weights.block > 0 && values.items() != times * tiles * weights.tile_bytes())
      weights.scale_bytes = sizeof(float);
    if (values.items() != times * tiles * weights.tile_bytes())
      throw std::runtime_error("weights have another size than the attributes say");
    return weights;
  }

  std::size_t outputs() const { return weights_.outputs; }
  std::size_t inputs() const { return weights_.inputs; }

 private:
  static Format format(const std::string& whole, const std::string& name) {
    if (name == "int4") return Format::int4;
    if (name == "int8") return Format::int8;
    const bool is_alone = name == whole;  // others have no offsets
    if (is_alone && name == "fp4") return Format::fp4;
    if (is_alone && name == "fp8") return Format::fp8;
    if (is_alone && name == "bf16") return Format::bf16;
    if (is_alone && name == "fp16") return Format::fp16;
    if (is_alone && name == "fp32") return Format::fp32;
    throw unknown(whole);
  }

  static Offset offset(const std::string& whole, const std::string& name) {
    if (name == "zeros") return Offset::zeros;
    if (name == "minimums") return Offset::minimums;
    throw unknown(whole);
  }

  static std::runtime_error unknown(const std::string& name) {
    return std::runtime_error("weights have the format '" + name +
                              "'; expected int4 or int8, these with -zeros or -minimums behind, "
                              "fp4, fp8, bf16, fp16 or fp32");
  }

  Weights weights_{};
};

// What most operators have in common.
struct Operator {
  static bool is_made(std::size_t index) { return index == 0; }  // each time, or where it is read
  static ONNXTensorElementDataType output_type(std::size_t) {
    return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
};

std::size_t tiles_of(std::size_t outputs) { return (outputs + kTile - 1) / kTile; }

Activation read_activation(const OrtKernelInfo* info) {
  const std::string name = text(info, "activation");
  if (name == "none") return Activation::none;
  if (name == "silu") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  throw std::runtime_error("an operator of specrt has the activation '" + name +
                           "'; expected none, silu or gelu");
}

// Memory of a thread; what was there is overwritten.
template <class Number>
Number* reserve(std::vector<Number>& memory, std::size_t count) {
  if (memory.size() < count) memory.resize(count);
  return memory.data();
}

// Memory of quantized rows.
struct RowCodes {
  std::vector<std::int8_t> codes;
  std::vector<float> scales, totals;
  std::vector<std::int32_t> sums;

  QuantizedRows rows(std::size_t count, const Weights& weights) {
    const std::size_t blocks = count * (weights.inputs / weights.block);
    return {reserve(codes, count * weights.inputs), reserve(scales, blocks), reserve(sums, blocks),
            reserve(totals, blocks)};
  }
};

// Those from `row` on.
QuantizedRows behind(const QuantizedRows& rows, std::size_t row, const Weights& weights) {
  const std::size_t inputs = row * weights.inputs, blocks = inputs / weights.block;
  return {rows.codes + inputs, rows.scales + blocks, rows.sums + blocks, rows.totals + blocks};
}

// The norm of the rows that begin after some floats.
Norm behind(Norm norm, std::size_t floats) {
  if (norm.residual != nullptr) norm.residual += floats;
  if (norm.sum != nullptr) norm.sum += floats;
  return norm;
}

// Run `body(row, count)` for kPartRows rows at a time.
template <class Body>
void in_shares(OrtKernelContext* context, std::size_t rows, const Body& body) {
  parallel(context, (rows + kPartRows - 1) / kPartRows, [&](std::size_t part) {
    const std::size_t begin = part * kPartRows;
    body(begin, rows - begin < kPartRows ? rows - begin : kPartRows);
  });
}

class MatMul : public Operator {
 public:
  static constexpr const char* kName = "MatMul";
  static constexpr std::size_t kInputs = 6, kOutputs = 2;
  static bool is_required(std::size_t index) { return index < 2; }
  static ONNXTensorElementDataType input_type(std::size_t index) {
    return index == 1 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }

  explicit MatMul(const OrtKernelInfo* info)
      : stored_(info), activation_(read_activation(info)), is_exact_(integer(info, "exact") != 0) {
    const std::string norm = text(info, "norm");
    if (norm != "none" && norm != "rms" && norm != "layer")
      throw std::runtime_error("specrt.MatMul has the norm '" + norm +
                               "'; expected none, rms or layer");
    norm_.is_centred = norm == "layer";
    norm_.epsilon = number(info, "epsilon");
    has_norm_ = norm != "none";
  }

  void compute(OrtKernelContext* context) const {
    const bool paired = activation_ != Activation::none;
    const std::size_t outputs = paired ? stored_.outputs() / 2 : stored_.outputs();
    const std::size_t tiles = tiles_of(outputs) * (paired ? 2 : 1);
    const Tensor x = input(context, 0), bias = input(context, 2);
    const Norm norm = has_norm_ ? read_norm(context, x) : Norm{};
    const Weights weights = stored_.read(context, 1, tiles);
    if (x.shape.empty() || (paired && stored_.outputs() % 2 != 0) ||
        static_cast<std::size_t>(x.shape.back()) != weights.inputs ||
        (bias.data != nullptr && bias.items() != tiles * kTile))
      throw std::runtime_error("specrt.MatMul got inputs of another size than its attributes say");
    const std::size_t rows = x.items() / weights.inputs;
    std::vector<std::int64_t> shape = x.shape;
    shape.back() = static_cast<std::int64_t>(outputs);
    const Output result{floats(context, 0, shape), outputs, static_cast<const float*>(bias.data),
                        activation_};
    if (rows > 0)
      multiply(context, weights, tiles, static_cast<const float*>(x.data), rows, norm, result);
  }

 private:
  Norm read_norm(OrtKernelContext* context, const Tensor& x) const {
    const Tensor residual = input(context, 3), weight = input(context, 4), bias = input(context, 5);
    if (weight.data == nullptr || weight.items() != stored_.inputs() ||
        (bias.data != nullptr && bias.shape != weight.shape) ||
        (residual.data != nullptr && residual.items() != x.items()))
      throw std::runtime_error("specrt.MatMul got a norm of another size than its rows");
    Norm norm = norm_;
    norm.residual = static_cast<const float*>(residual.data);
    norm.weight = static_cast<const float*>(weight.data);
    norm.bias = static_cast<const float*>(bias.data);
    norm.sum = floats(context, 1, x.shape);
    if (norm.sum != nullptr && norm.residual == nullptr)
      throw std::runtime_error("specrt.MatMul was asked for a sum without a residual");
    return norm;
  }

  void multiply(OrtKernelContext* context, const Weights& weights, std::size_t tiles,
                const float* x, std::size_t rows, const Norm& norm, const Output& result) const {
    const std::size_t strips = (tiles + kStrip - 1) / kStrip;
    const std::size_t wanted = tiles * weights.tile_bytes() / kPartBytes + 1;
    const std::size_t parts = wanted < strips ? wanted : strips;
    const auto first = [&](std::size_t part) {
      const std::size_t tile = strips * part / parts * kStrip;
      return tile < tiles ? tile : tiles;
    };
    for (std::size_t begin = 0; begin < rows; begin += kMostRows) {
      const std::size_t count = rows - begin < kMostRows ? rows - begin : kMostRows;
      const float* some = x + begin * weights.inputs;
      const Norm own = behind(norm, begin * weights.inputs);
      Output to = result;
      to.y += begin * result.stride;
      if (weights.has_codes() && !is_exact_) {
        const QuantizedRows quantized = quantize(context, weights, own, some, count);
        parallel(context, parts, [&](std::size_t part) {
          kernels().multiply(weights, quantized, count, first(part), first(part + 1), to);
        });
      } else {
        const bool is_slow = weights.block > 0 && is_exact_;
        const auto run = is_slow ? multiply_exactly : kernels().multiply_floats;
        if (has_norm_) some = normalize(context, weights.inputs, own, some, count);
        parallel(context, parts, [&](std::size_t part) {
          run(weights, some, count, first(part), first(part + 1), to);
        });
      }
    }
  }

  static const float* normalize(OrtKernelContext* context, std::size_t inputs, const Norm& norm,
                                const float* x, std::size_t rows) {
    thread_local std::vector<float> memory;
    float* normed = reserve(memory, rows * inputs);
    in_shares(context, rows, [&](std::size_t row, std::size_t count) {
      const std::size_t at = row * inputs;
      kernels().normalize(behind(norm, at), x + at, count, inputs, normed + at);
    });
    return normed;
  }

  QuantizedRows quantize(OrtKernelContext* context, const Weights& weights, const Norm& norm,
                         const float* x, std::size_t rows) const {
    thread_local RowCodes codes;
    const std::size_t inputs = weights.inputs;
    const QuantizedRows all = codes.rows(rows, weights);
    in_shares(context, rows, [&](std::size_t row, std::size_t count) {
      thread_local std::vector<float> memory;
      const float* from = x + row * inputs;
      if (has_norm_) {
        float* normed = reserve(memory, count * inputs);
        kernels().normalize(behind(norm, row * inputs), from, count, inputs, normed);
        from = normed;
      }
      kernels().quantize(from, count, inputs, weights.block, behind(all, row, weights));
    });
    return all;
  }

  StoredWeights stored_;
  Activation activation_;
  bool is_exact_, has_norm_;
  Norm norm_{};
};

// Tokens that go through the experts together: enough that an expert is multiplied with for longer
// than it takes to come from memory.
constexpr std::size_t kMostTokens = 256;

class Experts : public Operator {
 public:
  static constexpr const char* kName = "Experts";
  static constexpr std::size_t kInputs = 7, kOutputs = 1;
  static bool is_required(std::size_t index) { return index < 5; }
  static ONNXTensorElementDataType input_type(std::size_t index) {
    if (index == 1) return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
    return index == 3 || index == 4 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8
                                    : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }

  explicit Experts(const OrtKernelInfo* info)
      : experts_(size(info, "experts")),
        gate_up_(info, 2 * size(info, "I"), size(info, "H"), ""),
        down_(info, size(info, "H"), size(info, "I"), "down_"),
        activation_(read_activation(info)),
        is_exact_(integer(info, "exact") != 0) {
    if (experts_ == 0 || activation_ == Activation::none)
      throw std::runtime_error("specrt.Experts has " + std::to_string(experts_) +
                               " experts; expected 1 or more, with an activation");
  }

  void compute(OrtKernelContext* context) const {
    const Tensor x = input(context, 0), named = input(context, 1), shares = input(context, 2);
    const std::size_t width = down_.outputs();
    if (x.shape.empty() || static_cast<std::size_t>(x.shape.back()) != width ||
        named.shape.size() != x.shape.size() || shares.shape != named.shape)
      throw std::runtime_error("specrt.Experts got inputs of another size than its attributes say");
    const std::size_t tokens = x.items() / width;
    const auto slots = static_cast<std::size_t>(named.shape.back());
    if (named.items() != tokens * slots)
      throw std::runtime_error("specrt.Experts got experts of other tokens than it has");
    const Layer gate_up = read(context, gate_up_, 3, 5, 2 * tiles_of(down_.inputs()));
    const Layer down = read(context, down_, 4, 6, tiles_of(width));
    float* y = floats(context, 0, x.shape);
    for (std::size_t first = 0; first < tokens; first += kMostTokens) {
      const std::size_t count = tokens - first < kMostTokens ? tokens - first : kMostTokens;
      const Routed routed =
          route(static_cast<const std::int64_t*>(named.data) + first * slots, count, slots);
      run(context, gate_up, down, routed, static_cast<const float*>(x.data) + first * width,
          static_cast<const float*>(shares.data) + first * slots, y + first * width);
    }
  }

 private:
  // A product of each expert.
  struct Layer {
    Weights weights;  // of the first
    const float* bias;
    bool has_codes;

    std::size_t bytes() const { return weights.tiles * weights.tile_bytes(); }
  };

  // Slots of some tokens by expert: those of one follow each other, in the order of the tokens.
  struct Routed {
    struct Part {
      std::size_t expert, first, count;
    };
    std::size_t tokens, slots;
    std::vector<Part> parts;            // of experts that are named
    std::vector<std::size_t> token_of;  // by place
    std::vector<std::size_t> place_of;  // [tokens, slots]
  };

  Layer read(const OrtKernelContext* context, const StoredWeights& stored, std::size_t index,
             std::size_t bias_index, std::size_t wanted) const {
    const std::size_t tiles = (wanted + kStrip - 1) / kStrip * kStrip;
    const Tensor bias = input(context, bias_index);
    if (bias.data != nullptr && bias.items() != experts_ * tiles * kTile)
      throw std::runtime_error("specrt.Experts got a bias of another size than its experts");
    const Weights weights = stored.read(context, index, tiles, experts_);
    return {weights, static_cast<const float*>(bias.data), weights.has_codes() && !is_exact_};
  }

  // Sort slots by counting.
  Routed route(const std::int64_t* named, std::size_t tokens, std::size_t slots) const {
    std::vector<std::size_t> ends(experts_ + 1);
    for (std::size_t i = 0; i < tokens * slots; i++) {
      if (static_cast<std::uint64_t>(named[i]) >= experts_)
        throw std::runtime_error("specrt.Experts got expert " + std::to_string(named[i]) +
                                 "; it has " + std::to_string(experts_));
      ends[static_cast<std::size_t>(named[i]) + 1]++;
    }
    Routed routed{tokens,
                  slots,
                  {},
                  std::vector<std::size_t>(tokens * slots),
                  std::vector<std::size_t>(tokens * slots)};
    for (std::size_t expert = 0; expert < experts_; expert++) {
      if (ends[expert + 1] > 0) routed.parts.push_back({expert, ends[expert], ends[expert + 1]});
      ends[expert + 1] += ends[expert];
    }
    for (std::size_t i = 0; i < tokens * slots; i++) {
      const std::size_t place = ends[static_cast<std::size_t>(named[i])]++;
      routed.token_of[place] = i / slots;
      routed.place_of[i] = place;
    }
    return routed;
  }

  void run(OrtKernelContext* context, const Layer& gate_up, const Layer& down, const Routed& routed,
           const float* x, const float* shares, float* y) const {
    const std::size_t places = routed.token_of.size();
    const std::size_t width = down.weights.outputs, inner = down.weights.inputs;
    thread_local std::vector<float> memory_of_inner, memory_of_outputs;
    float* hidden = reserve(memory_of_inner, places * inner);
    float* outputs = reserve(memory_of_outputs, places * width);
    multiply(context, gate_up, routed, x, &routed.token_of, {hidden, inner, nullptr, activation_});
    multiply(context, down, routed, hidden, nullptr, {outputs, width, nullptr, Activation::none});
    in_shares(context, routed.tokens, [&](std::size_t first, std::size_t count) {
      for (std::size_t at = first * routed.slots; at < (first + count) * routed.slots;
           at += routed.slots)
        kernels().add_rows(outputs, routed.place_of.data() + at, shares + at, routed.slots, width,
                           y + at / routed.slots * width);
    });
  }

  // Multiply the rows of each place with its expert. `row_of` says by place which rows of x these
  // are; none: those in order.
  void multiply(OrtKernelContext* context, const Layer& layer, const Routed& routed, const float* x,
                const std::vector<std::size_t>* row_of, const Output& result) const {
    const std::size_t places = routed.token_of.size();
    const std::size_t rows = row_of == nullptr ? places : routed.tokens;
    QuantizedRows codes{};
    if (layer.has_codes) {
      thread_local RowCodes memory, memory_by_place;
      codes = memory.rows(rows, layer.weights);
      in_shares(context, rows, [&](std::size_t row, std::size_t count) {
        kernels().quantize(x + row * layer.weights.inputs, count, layer.weights.inputs,
                           layer.weights.block, behind(codes, row, layer.weights));
      });
      if (row_of != nullptr) codes = gather(codes, memory_by_place, *row_of, layer.weights);
    } else if (row_of != nullptr) {
      thread_local std::vector<float> memory;
      float* gathered = reserve(memory, places * layer.weights.inputs);
      for (std::size_t place = 0; place < places; place++)
        std::memcpy(gathered + place * layer.weights.inputs,
                    x + (*row_of)[place] * layer.weights.inputs,
                    layer.weights.inputs * sizeof(float));
      x = gathered;
    }
    const std::size_t tiles = layer.weights.tiles, strips = (tiles + kStrip - 1) / kStrip;
    const std::size_t wanted = layer.bytes() / kPartBytes + 1;
    const std::size_t shares = wanted < strips ? wanted : strips;
    parallel(context, routed.parts.size() * shares, [&](std::size_t index) {
      const auto& part = routed.parts[index / shares];
      const std::size_t share = index % shares;
      const auto first = [&](std::size_t of) {
        const std::size_t tile = strips * of / shares * kStrip;
        return tile < tiles ? tile : tiles;
      };
      Weights weights = layer.weights;
      weights.values += part.expert * layer.bytes();
      Output to = result;
      to.y += part.first * result.stride;
      if (layer.bias != nullptr) to.bias = layer.bias + part.expert * tiles * kTile;
      const std::size_t begin = first(share), end = first(share + 1);
      const float* own = x + part.first * weights.inputs;
      if (layer.has_codes)
        kernels().multiply(weights, behind(codes, part.first, weights), part.count, begin, end, to);
      else if (is_exact_ && weights.block > 0)
        multiply_exactly(weights, own, part.count, begin, end, to);
      else
        kernels().multiply_floats(weights, own, part.count, begin, end, to);
    });
  }

  static QuantizedRows gather(const QuantizedRows& from, RowCodes& memory,
                              const std::vector<std::size_t>& row_of, const Weights& weights) {
    const std::size_t blocks = weights.inputs / weights.block;
    const QuantizedRows all = memory.rows(row_of.size(), weights);
    for (std::size_t place = 0; place < row_of.size(); place++) {
      const QuantizedRows one = behind(from, row_of[place], weights),
                          to = behind(all, place, weights);
      std::memcpy(to.codes, one.codes, weights.inputs);
      std::memcpy(to.scales, one.scales, blocks * sizeof *to.scales);
      std::memcpy(to.sums, one.sums, blocks * sizeof *to.sums);
      std::memcpy(to.totals, one.totals, blocks * sizeof *to.totals);
    }
    return all;
  }

  std::size_t experts_;
  StoredWeights gate_up_, down_;
  Activation activation_;
  bool is_exact_;
};

class Scores : public Operator {
 public:
  static constexpr const char* kName = "Scores";
  static constexpr std::size_t kInputs = 1, kOutputs = 2;
  static bool is_required(std::size_t) { return true; }
  static ONNXTensorElementDataType input_type(std::size_t) {
    return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  static ONNXTensorElementDataType output_type(std::size_t index) {
    return index == 0 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }

  explicit Scores(const OrtKernelInfo*) {}

  void compute(OrtKernelContext* context) const {
    const Tensor logits = input(context, 0);
    if (logits.shape.empty()) throw std::runtime_error("specrt.Scores got logits without an axis");
    const auto vocabulary = static_cast<std::size_t>(logits.shape.back());
    std::vector<std::int64_t> shape = logits.shape;
    shape.pop_back();
    auto* best = static_cast<std::int64_t*>(output(context, 0, shape));
    float* confidence = floats(context, 1, shape);
    std::size_t rows = 1;
    for (const std::int64_t size : shape) rows *= static_cast<std::size_t>(size);
    const std::size_t wanted = rows * vocabulary / kPartScores + 1;
    const std::size_t parts = wanted < rows ? wanted : rows;
    parallel(context, parts, [&](std::size_t part) {
      for (std::size_t row = rows * part / parts; row < rows * (part + 1) / parts; row++)
        kernels().score(static_cast<const float*>(logits.data) + row * vocabulary, vocabulary,
                        best + row, confidence == nullptr ? nullptr : confidence + row);
    });
  }
};

class Embedding : public Operator {
 public:
  static constexpr const char* kName = "Embedding";
  static constexpr std::size_t kInputs = 2, kOutputs = 1;
  static bool is_required(std::size_t) { return true; }
  static ONNXTensorElementDataType input_type(std::size_t index) {
    return index == 0 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 : ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
  }

  explicit Embedding(const OrtKernelInfo* info) : stored_(info) {}

  void compute(OrtKernelContext* context) const {
    const Tensor tokens = input(context, 0);
    const Weights weights = stored_.read(context, 1, tiles_of(stored_.outputs()));
    const auto* rows = static_cast<const std::int64_t*>(tokens.data);
    for (std::size_t i = 0; i < tokens.items(); i++)
      if (static_cast<std::uint64_t>(rows[i]) >= weights.outputs)
        throw std::runtime_error("token " + std::to_string(rows[i]) + " is none of the " +
                                 std::to_string(weights.outputs) + " of the vocabulary");
    std::vector<std::int64_t> shape = tokens.shape;
    shape.push_back(static_cast<std::int64_t>(weights.inputs));
    float* y = floats(context, 0, shape);
    for (std::size_t i = 0; i < tokens.items(); i++)
      look_up(weights, static_cast<std::size_t>(rows[i]), y + i * weights.inputs);
  }

 private:
  StoredWeights stored_;
};

// Queries that one part attends with: enough that a key is read once for many.
constexpr std::size_t kPartQueries = 32;
// Floats of a line of a cache.
constexpr std::size_t kLine = 16;

// Of attention: the sizes that attributes say.
Attention read_sizes(const OrtKernelInfo* info, const char* name) {
  Attention attention{};
  attention.heads = size(info, "num_heads");
  attention.kv_heads = size(info, "kv_num_heads");
  attention.key_width = size(info, "head_size");
  attention.value_width = optional_integer(info, "value_size") > 0
                              ? static_cast<std::size_t>(optional_integer(info, "value_size"))
                              : attention.key_width;
  attention.scale = number(info, "scale");
  attention.softcap = number(info, "softcap");
  const std::size_t heads = attention.heads, kv_heads = attention.kv_heads;
  const std::size_t widest = std::max(attention.key_width, attention.value_width);
  if (kv_heads == 0 || heads == 0 || heads % kv_heads != 0 || attention.key_width == 0 ||
      widest >= std::size_t{kMostCount} || heads * widest >= std::size_t{kMostCount})
    throw std::runtime_error(
        "specrt." + std::string(name) + " has " + std::to_string(heads) + " heads of " +
        std::to_string(widest) + " over " + std::to_string(kv_heads) +
        " of keys; expected a multiple, and fewer than " + std::to_string(kMostCount) + " numbers");
  return attention;
}

// The positions that buffers of keys [B, kv_heads, P / 16, D, 16] and values [B, kv_heads, P, ..]
// have.
std::size_t positions_of(const Attention& attention, const Tensor& keys, const Tensor& values,
                         const char* name) {
  const bool have_axes = keys.shape.size() == 5 && values.shape.size() == 4;
  const auto rows = static_cast<std::size_t>(have_axes ? keys.shape[0] : 0);
  const auto positions = static_cast<std::size_t>(have_axes ? values.shape[2] : 0);
  const std::size_t items = rows * attention.kv_heads * positions;
  if (!have_axes || positions % kTile != 0 || keys.shape[0] != values.shape[0] ||
      keys.items() != items * attention.key_width ||
      values.items() != items * attention.value_stride())
    throw std::runtime_error("specrt." + std::string(name) +
                             " got KV buffers of other sizes than it expects");
  return positions;
}

// Tokens of one row that attend together.
struct Part {
  std::size_t first, count;
};

// Cut the tokens of a pass, from the first one on that has a query, where `goes_on(token)` is
// false, and where a part has enough queries.
template <class GoesOn>
std::vector<Part> parts_of(const Attention& attention, std::size_t first, std::size_t count,
                           const GoesOn& goes_on) {
  const std::size_t shared = attention.heads / attention.kv_heads;
  const std::size_t most = shared < kPartQueries ? kPartQueries / shared : 1;
  std::vector<Part> parts;
  for (std::size_t token = first; token < count; token++) {
    if (token > first && parts.back().count < most && goes_on(token))
      parts.back().count++;
    else
      parts.push_back({token, 1});
  }
  return parts;
}

// Memory of this thread, which begins with a line: a vector that lies in two is read twice.
float* aligned_scratch(std::size_t floats) {
  thread_local std::vector<float> memory;
  if (memory.size() < floats + kLine) memory.resize(floats + kLine);
  float* aligned = memory.data();
  while (reinterpret_cast<std::uintptr_t>(aligned) % (kLine * sizeof(float)) != 0) aligned++;
  return aligned;
}

// Attend with all parts. Those of one head follow each other, so that its keys and values stay in a
// cache.
void attend_parts(OrtKernelContext* context, const Attention& attention, const Tokens& tokens,
                  const std::vector<Part>& parts, float* y) {
  parallel(context, parts.size() * attention.kv_heads, [&](std::size_t index) {
    const Part part = parts[index % parts.size()];
    const std::size_t at = part.first + part.count - 1;
    const auto last = static_cast<std::size_t>(tokens.ends == nullptr ? tokens.positions[at]
                                                                      : tokens.ends[at] - 1);
    float* scratch = aligned_scratch(attend_floats(attention, part.count, last));
    kernels().attend(attention, tokens, part.first, part.count, index / parts.size(), scratch, y);
  });
}

// The memory of an output; what the input holds is copied where it is other memory.
template <class Item = float>
Item* in_place(OrtKernelContext* context, std::size_t index, const Tensor& buffer) {
  auto* memory = static_cast<Item*>(output(context, index, buffer.shape));
  if (memory != buffer.data) std::memcpy(memory, buffer.data, buffer.items() * sizeof(Item));
  return memory;
}

void check_places(const char* name, const std::int64_t* rows, const std::int64_t* positions,
                  std::size_t count, std::size_t most_rows, std::size_t most_positions) {
  for (std::size_t token = 0; token < count; token++)
    if (static_cast<std::uint64_t>(rows[token]) >= most_rows ||
        static_cast<std::uint64_t>(positions[token]) >= most_positions)
      throw std::runtime_error(
          "specrt." + std::string(name) + " got position " + std::to_string(positions[token]) +
          " of row " + std::to_string(rows[token]) + "; it has " + std::to_string(most_rows) +
          " rows of " + std::to_string(most_positions));
}

// Hold the tokens of each row to a ring: none may be written over what a token before it sees.
void check_ring(const char* name, const std::int64_t* rows, std::size_t count, std::size_t seen,
                std::size_t positions) {
  std::size_t run = 0;
  for (std::size_t token = 0; token < count; token++) {
    run = token > 0 && rows[token] == rows[token - 1] ? run + 1 : 1;
    if (run + seen > positions + 1)
      throw std::runtime_error("specrt." + std::string(name) + " got " + std::to_string(run) +
                               " tokens of row " + std::to_string(rows[token]) + ", which see " +
                               std::to_string(seen) + " positions each, over a ring of " +
                               std::to_string(positions));
  }
}

// Some tokens of a row, from position `start` on.
struct Run {
  std::size_t row, first, count, start;
};

// The tokens of each row, which must lie together; `all` is how many rows there are.
std::vector<Run> runs_of(const char* name, const std::int64_t* rows, const std::int64_t* positions,
                         std::size_t count, std::size_t all) {
  std::vector<Run> runs;
  std::vector<bool> is_seen(all);
  for (std::size_t token = 0; token < count; token++) {
    const auto row = static_cast<std::size_t>(rows[token]);
    if (token > 0 && rows[token] == rows[token - 1] &&
        positions[token] == positions[token - 1] + 1) {
      runs.back().count++;
      continue;
    }
    if (is_seen[row])
      throw std::runtime_error("specrt." + std::string(name) + " got position " +
                               std::to_string(positions[token]) + " of row " +
                               std::to_string(rows[token]) +
                               " apart; expected the tokens of a row one after another");
    is_seen[row] = true;
    runs.push_back({row, token, 1, static_cast<std::size_t>(positions[token])});
  }
  return runs;
}

class AttentionOperator : public Operator {
 public:
  static constexpr const char* kName = "Attention";
  static constexpr std::size_t kInputs = 10, kOutputs = 3;
  static bool is_made(std::size_t index) { return index == 0; }
  static bool is_required(std::size_t index) { return index != 1 && index != 2 && index < 7; }
  static ONNXTensorElementDataType input_type(std::size_t index) {
    return index == 5 || index == 6 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64
                                    : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }

  explicit AttentionOperator(const OrtKernelInfo* info) : attention_(read_sizes(info, kName)) {
    attention_.window = static_cast<std::size_t>(integer(info, "local_window_size"));
    is_bidirectional_ = optional_integer(info, "bidirectional") != 0;
    is_shared_ = optional_integer(info, "shared") != 0;
    is_ring_ = optional_integer(info, "ring") != 0;
  }

  void compute(OrtKernelContext* context) const {
    const Tensor query = input(context, 0), key = input(context, 1), value = input(context, 2);
    const Tensor keys = input(context, 3), values = input(context, 4);
    const Tensor rows = input(context, 5), positions = input(context, 6);
    const Tensor cosines = input(context, 7), sines = input(context, 8), biases = input(context, 9);
    Attention attention = attention_;
    const std::size_t wide = attention.heads * attention.key_width;
    const std::size_t key_size = attention.kv_heads * attention.key_width;
    const std::size_t value_size = attention.kv_heads * attention.value_width;
    const bool joined = key.data == nullptr && !is_shared_;
    const std::size_t count = rows.items(), queries = joined ? count : query.items() / wide;
    const std::size_t all = wide + key_size + value_size;
    const bool have_own = key.data != nullptr && value.data != nullptr &&
                          key.items() == count * key_size && value.items() == count * value_size;
    if (positions.items() != count || queries > count ||
        query.items() != queries * (joined ? all : wide) || (!joined && have_own == is_shared_))
      throw std::runtime_error(
          "specrt.Attention got inputs of other sizes than its attributes say");
    attention.positions = positions_of(attention, keys, values, kName);
    std::int64_t places = is_ring_ ? std::int64_t{kMostCount} : values.shape[2];
    if (cosines.data != nullptr) {
      if (cosines.shape.size() != 2 || sines.shape != cosines.shape ||
          2 * static_cast<std::size_t>(cosines.shape[1]) > attention.key_width)
        throw std::runtime_error(
            "specrt.Attention got cosines and sines that are not [positions, half of a head or "
            "less]");
      if (cosines.shape[0] < places) places = cosines.shape[0];
      attention.angles = 2 * static_cast<std::size_t>(cosines.shape.back());
      attention.cosines = static_cast<const float*>(cosines.data);
      attention.sines = static_cast<const float*>(sines.data);
    }
    if (biases.data != nullptr) {
      if (biases.shape.size() != 2 || biases.items() == 0 ||
          static_cast<std::size_t>(biases.shape[0]) != attention.heads)
        throw std::runtime_error("specrt.Attention got biases that are not [heads, reach]");
      if (is_bidirectional_)
        throw std::runtime_error(
            "specrt.Attention got biases, which are of keys before a query, for queries that see "
            "those behind");
      attention.reach = static_cast<std::size_t>(biases.shape[1]);
      attention.biases = static_cast<const float*>(biases.data);
    }
    // What is shared was appended by the layer that it is of, and is only read.
    attention.keys = is_shared_ ? const_cast<float*>(static_cast<const float*>(keys.data))
                                : in_place(context, 1, keys);
    attention.values = is_shared_ ? const_cast<float*>(static_cast<const float*>(values.data))
                                  : in_place(context, 2, values);
    Tokens tokens{};
    tokens.rows = static_cast<const std::int64_t*>(rows.data);
    tokens.positions = static_cast<const std::int64_t*>(positions.data);
    tokens.first_query = count - queries;
    tokens.queries = static_cast<const float*>(query.data);
    tokens.keys = joined ? tokens.queries + wide : static_cast<const float*>(key.data);
    tokens.values = joined ? tokens.keys + key_size : static_cast<const float*>(value.data);
    tokens.query_stride = joined ? all : wide;
    tokens.key_stride = joined ? all : key_size;
    tokens.value_stride = joined ? all : value_size;
    check_places(kName, tokens.rows, tokens.positions, count,
                 static_cast<std::size_t>(keys.shape[0]), static_cast<std::size_t>(places));
    if (is_ring_) check_ring(kName, tokens.rows, count, attention.window, attention.positions);
    float* y = floats(context, 0,
                      {1, static_cast<std::int64_t>(queries),
                       static_cast<std::int64_t>(attention.heads * attention.value_width)});
    std::vector<std::int64_t> ends;
    if (is_bidirectional_) {
      ends = ends_of_runs(tokens, count);
      tokens.ends = ends.data();
    }
    run(context, attention, tokens, count, y);
  }

 private:
  // Whether a query goes on where the one before it stands.
  static bool goes_on(const Tokens& tokens, std::size_t token) {
    return token > tokens.first_query && tokens.rows[token] == tokens.rows[token - 1] &&
           tokens.positions[token] == tokens.positions[token - 1] + 1;
  }

  // After the last of the queries that follow each other, for each of them.
  static std::vector<std::int64_t> ends_of_runs(const Tokens& tokens, std::size_t count) {
    std::vector<std::int64_t> ends(count);
    for (std::size_t token = count; token-- > 0;)
      ends[token] = token + 1 < count && goes_on(tokens, token + 1) ? ends[token + 1]
                                                                    : tokens.positions[token] + 1;
    return ends;
  }

  static void run(OrtKernelContext* context, const Attention& attention, const Tokens& tokens,
                  std::size_t count, float* y) {
    const std::vector<Part> parts =
        parts_of(attention, tokens.first_query, count,
                 [&](std::size_t token) { return goes_on(tokens, token); });
    const std::size_t shares =
        tokens.keys == nullptr ? 0 : (count + kPartRows - 1) / kPartRows;  // none: they are shared
    parallel(context, shares, [&](std::size_t share) {
      const std::size_t end = (share + 1) * kPartRows < count ? (share + 1) * kPartRows : count;
      for (std::size_t token = share * kPartRows; token < end; token++)
        kernels().append(attention, tokens, token);
    });
    attend_parts(context, attention, tokens, parts, y);
  }

  Attention attention_;
  bool is_bidirectional_ = false, is_shared_ = false, is_ring_ = false;
};

// Products are not fused with sums here, so that every build has the same bits.
class Convolution : public Operator {
 public:
  static constexpr const char* kName = "Convolution";
  static constexpr std::size_t kInputs = 6, kOutputs = 2;
  static bool is_made(std::size_t) { return true; }
  static bool is_required(std::size_t index) { return index < 5; }
  static ONNXTensorElementDataType input_type(std::size_t index) {
    return index == 2 || index == 3 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64
                                    : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }

  explicit Convolution(const OrtKernelInfo*) {}

  void compute(OrtKernelContext* context) const {
    const Tensor x = input(context, 0), ring = input(context, 1);
    const Tensor rows = input(context, 2), positions = input(context, 3);
    const Tensor weight = input(context, 4), bias = input(context, 5);
    const bool have_axes = ring.shape.size() == 4 && weight.shape.size() == 2;
    const std::size_t count = rows.items();
    const auto taps = static_cast<std::size_t>(have_axes ? weight.shape[0] : 0);
    const auto channels = static_cast<std::size_t>(have_axes ? weight.shape[1] : 0);
    const auto length = static_cast<std::size_t>(have_axes ? ring.shape[2] : 0);
    const auto stride = static_cast<std::size_t>(have_axes ? ring.shape[3] : 0);
    if (taps == 0 || positions.items() != count || x.items() != count * channels ||
        ring.shape[1] != 1 || stride < channels || length < taps ||
        (bias.data != nullptr && bias.items() != channels))
      throw std::runtime_error("specrt.Convolution got inputs of sizes that do not fit together");
    const auto* row_of = static_cast<const std::int64_t*>(rows.data);
    const auto* place_of = static_cast<const std::int64_t*>(positions.data);
    const auto all = static_cast<std::size_t>(ring.shape[0]);
    check_places(kName, row_of, place_of, count, all, static_cast<std::size_t>(kMostCount));
    const std::vector<Run> runs = runs_of(kName, row_of, place_of, count, all);
    const auto* from = static_cast<const float*>(x.data);
    float* y = floats(context, 0, x.shape);
    float* memory = in_place(context, 1, ring);
    const auto input_at = [&](std::size_t row, std::size_t position) {
      return memory + (row * length + position % length) * stride;
    };
    const auto each = [&](const auto& body) {
      const std::size_t shares = (count + kPartRows - 1) / kPartRows;
      parallel(context, shares, [&](std::size_t share) {
        const std::size_t begin = share * kPartRows, end = begin + kPartRows;
        for (const Run& run : runs)
          for (std::size_t at = begin < run.first ? 0 : begin - run.first;
               at < run.count && run.first + at < end; at++)
            body(run, at);
      });
    };
    each([&](const Run& run, std::size_t at) {
      const float* own = from + (run.first + at) * channels;
      float* to = y + (run.first + at) * channels;
      if (bias.data == nullptr)
        std::fill_n(to, channels, 0.0F);
      else
        std::memcpy(to, bias.data, channels * sizeof(float));
      const std::size_t position = run.start + at;
      for (std::size_t tap = position + 1 < taps ? taps - 1 - position : 0; tap < taps; tap++) {
        const std::size_t back = taps - 1 - tap;
        const float* past = back <= at ? own - back * channels : input_at(run.row, position - back);
        const float* factors = static_cast<const float*>(weight.data) + tap * channels;
        for (std::size_t i = 0; i < channels; i++) to[i] += past[i] * factors[i];
      }
    });
    each([&](const Run& run, std::size_t at) {
      if (run.count - at <= length)
        std::memcpy(input_at(run.row, run.start + at), from + (run.first + at) * channels,
                    channels * sizeof(float));
    });
  }
};

class RecurrenceOperator : public Operator {
 public:
  static constexpr const char* kName = "Recurrence";
  static constexpr std::size_t kInputs = 10, kOutputs = 4;
  static bool is_made(std::size_t) { return true; }
  static bool is_required(std::size_t) { return true; }
  static ONNXTensorElementDataType input_type(std::size_t index) {
    return index < 7 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  }
  static ONNXTensorElementDataType output_type(std::size_t index) {
    return index < 3 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  }

  explicit RecurrenceOperator(const OrtKernelInfo* info) {
    recurrence_.heads = size(info, "num_heads");
    recurrence_.key_heads = size(info, "key_heads");
    recurrence_.key_size = size(info, "key_size");
    recurrence_.value_size = size(info, "value_size");
    recurrence_.scale = number(info, "scale");
    recurrence_.epsilon = number(info, "epsilon");
    recurrence_.is_delta = integer(info, "delta") != 0;
    lag_ = size(info, "lag");
    const std::size_t heads = recurrence_.heads, key_heads = recurrence_.key_heads;
    const std::size_t widest = std::max(recurrence_.key_size, recurrence_.value_size);
    if (key_heads == 0 || heads == 0 || heads % key_heads != 0 || recurrence_.key_size == 0 ||
        recurrence_.value_size == 0 || heads * widest >= std::size_t{kMostCount} ||
        !(recurrence_.epsilon >= 0))
      throw std::runtime_error("specrt.Recurrence has " + std::to_string(heads) + " heads of " +
                               std::to_string(widest) + " over " + std::to_string(key_heads) +
                               " of keys, and epsilon " + std::to_string(recurrence_.epsilon) +
                               "; expected a multiple, fewer than " + std::to_string(kMostCount) +
                               " numbers, and 0 or more");
  }

  void compute(OrtKernelContext* context) const {
    const Tensor query = input(context, 0), key = input(context, 1), value = input(context, 2);
    const Tensor decay = input(context, 3), beta = input(context, 4);
    const Tensor state = input(context, 5), factors = input(context, 6);
    const Tensor base = input(context, 7);
    const Tensor rows = input(context, 8), positions = input(context, 9);
    Recurrence recurrence = recurrence_;
    const std::size_t heads = recurrence.heads, count = rows.items(), all = base.items();
    const std::size_t keys = count * recurrence.key_heads * recurrence.key_size;
    const std::size_t values = count * heads * recurrence.value_size;
    const bool have_axes = !state.shape.empty() && factors.shape.size() == 4;
    recurrence.positions = static_cast<std::size_t>(have_axes ? factors.shape[2] : 0);
    if (recurrence.positions == 0 || recurrence.positions % kTile != 0 ||
        positions.items() != count || query.items() != keys || key.items() != keys ||
        value.items() != values || decay.items() != count * heads ||
        beta.items() != count * heads || static_cast<std::size_t>(state.shape[0]) != all ||
        static_cast<std::size_t>(factors.shape[0]) != all ||
        state.items() != all * heads * recurrence.key_size * recurrence.value_stride() ||
        factors.items() != all * recurrence.positions * recurrence.factors_stride())
      throw std::runtime_error(
          "specrt.Recurrence got inputs of other sizes than its attributes say");
    const auto* row_of = static_cast<const std::int64_t*>(rows.data);
    const auto* place_of = static_cast<const std::int64_t*>(positions.data);
    check_places(kName, row_of, place_of, count, all, static_cast<std::size_t>(kMostCount));
    std::vector<RecurrentRow> runs;
    for (const Run& run : runs_of(kName, row_of, place_of, count, all)) {
      const std::int64_t held =
          run.start == 0 ? 0 : static_cast<const std::int64_t*>(base.data)[run.row];
      runs.push_back(fold(run, static_cast<std::size_t>(held), recurrence.positions));
    }
    const std::unique_ptr<float[]> prepared(new float[count * recurrence.prepared_size()]);
    recurrence.state = in_place(context, 1, state);
    recurrence.factors = in_place(context, 2, factors);
    const Steps steps{static_cast<const float*>(query.data), static_cast<const float*>(key.data),
                      static_cast<const float*>(value.data), static_cast<const float*>(decay.data),
                      static_cast<const float*>(beta.data),  prepared.get(),
                      floats(context, 0, value.shape)};
    auto* held = in_place<std::int64_t>(context, 3, base);
    for (const RecurrentRow& run : runs) held[run.row] = -1;  // of a pass that ends half done
    run(context, recurrence, steps, runs, count);
    for (const RecurrentRow& run : runs) held[run.row] = static_cast<std::int64_t>(run.next_base);
  }

 private:
  // Say what of a row is added to its state; a negative base is a large number here.
  RecurrentRow fold(const Run& run, std::size_t base, std::size_t ring) const {
    const std::size_t end = run.start + run.count;
    if (base > run.start || run.start - base > ring || lag_ >= ring)
      throw std::runtime_error(
          "specrt.Recurrence got base " + std::to_string(static_cast<std::int64_t>(base)) +
          " of row " + std::to_string(run.row) + " and lag " + std::to_string(lag_) +
          " for positions " + std::to_string(run.start) + " to " + std::to_string(end - 1) +
          "; expected at most " + std::to_string(run.start) + ", and less than " +
          std::to_string(ring) + ", which its ring holds");
    const std::size_t next =
        std::max({base, run.start - std::min(run.start, lag_), end - std::min(end, ring)});
    return {run.row, run.first, run.count, run.start, base, next};
  }

  static void run(OrtKernelContext* context, const Recurrence& recurrence, const Steps& steps,
                  const std::vector<RecurrentRow>& runs, std::size_t count) {
    const std::size_t shares = (count + kPartRows - 1) / kPartRows;
    parallel(context, shares, [&](std::size_t share) {
      const std::size_t end = std::min((share + 1) * kPartRows, count);
      for (std::size_t token = share * kPartRows; token < end; token++)
        kernels().prepare(recurrence, steps, token);
    });
    const std::size_t tasks = runs.size() * recurrence.heads;
    std::size_t positions = 0;  // that are added or computed
    for (const RecurrentRow& run : runs) positions += run.count + run.start - run.base;
    const std::size_t bytes = recurrence.state_floats() * sizeof(float) * positions;
    const std::size_t parts = std::min(bytes / kPartBytes + 1, tasks);
    parallel(context, parts, [&](std::size_t part) {
      float* scratch = aligned_scratch(recur_floats(recurrence));
      for (std::size_t i = tasks * part / parts; i < tasks * (part + 1) / parts; i++)
        kernels().recur(recurrence, steps, runs[i / recurrence.heads], i % recurrence.heads,
                        scratch);
    });
    keep(context, recurrence, steps, runs, count);
  }

  // Write what the last tokens of each row add into its ring.
  static void keep(OrtKernelContext* context, const Recurrence& recurrence, const Steps& steps,
                   const std::vector<RecurrentRow>& runs, std::size_t count) {
    const std::size_t shares = (count + kPartRows - 1) / kPartRows;
    parallel(context, shares, [&](std::size_t share) {
      for (const RecurrentRow& run : runs) {
        const std::size_t end = run.first + run.count;
        for (std::size_t token = end - std::min(run.count, recurrence.positions); token < end;
             token++)
          if (token % shares == share) keep_factors(recurrence, steps, run, token);
      }
    });
  }

  Recurrence recurrence_{};
  std::size_t lag_ = 0;
};

class CrossAttention : public Operator {
 public:
  static constexpr const char* kName = "CrossAttention";
  static constexpr std::size_t kInputs = 5, kOutputs = 1;
  static bool is_required(std::size_t) { return true; }
  static ONNXTensorElementDataType input_type(std::size_t index) {
    return index < 3 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  }

  explicit CrossAttention(const OrtKernelInfo* info) : attention_(read_sizes(info, kName)) {}

  void compute(OrtKernelContext* context) const {
    const Tensor query = input(context, 0), keys = input(context, 1), values = input(context, 2);
    const Tensor rows = input(context, 3), lengths = input(context, 4);
    Attention attention = attention_;
    const std::size_t wide = attention.heads * attention.key_width, count = rows.items();
    attention.positions = positions_of(attention, keys, values, kName);
    if (query.items() != count * wide || lengths.items() != static_cast<std::size_t>(keys.shape[0]))
      throw std::runtime_error(
          "specrt.CrossAttention got inputs of other sizes than its attributes say");
    // Nothing is appended, so nothing is written there.
    attention.keys = const_cast<float*>(static_cast<const float*>(keys.data));
    attention.values = const_cast<float*>(static_cast<const float*>(values.data));
    Tokens tokens{};
    tokens.rows = static_cast<const std::int64_t*>(rows.data);
    tokens.queries = static_cast<const float*>(query.data);
    tokens.query_stride = wide;
    // Each stands where the last key does: it sees all up to there.
    const std::vector<std::int64_t> positions =
        last_keys(tokens.rows, count, lengths, attention.positions);
    tokens.positions = positions.data();
    float* y = floats(context, 0,
                      {1, static_cast<std::int64_t>(count),
                       static_cast<std::int64_t>(attention.heads * attention.value_width)});
    const std::vector<Part> parts = parts_of(attention, 0, count, [&](std::size_t token) {
      return tokens.rows[token] == tokens.rows[token - 1];
    });
    attend_parts(context, attention, tokens, parts, y);
  }

 private:
  static std::vector<std::int64_t> last_keys(const std::int64_t* rows, std::size_t count,
                                             const Tensor& lengths, std::size_t positions) {
    const auto* of_row = static_cast<const std::int64_t*>(lengths.data);
    std::vector<std::int64_t> last(count);
    for (std::size_t token = 0; token < count; token++) {
      if (static_cast<std::uint64_t>(rows[token]) >= lengths.items())
        throw std::runtime_error("specrt.CrossAttention got row " + std::to_string(rows[token]) +
                                 "; it has " + std::to_string(lengths.items()));
      const std::int64_t length = of_row[rows[token]];
      if (length < 1 || static_cast<std::uint64_t>(length) > positions)
        throw std::runtime_error("specrt.CrossAttention got length " + std::to_string(length) +
                                 " of row " + std::to_string(rows[token]) + "; expected 1 to " +
                                 std::to_string(positions));
      last[token] = length - 1;
    }
    return last;
  }

  Attention attention_;
};

// Run something of C++ for a caller that takes a status.
template <class Body>
OrtStatus* guarded(const Body& body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    return ort()->CreateStatus(ORT_FAIL, error.what());
  }
}

template <class Described>
const OrtCustomOp& described() {
  static const OrtCustomOp description = [] {
    OrtCustomOp op{};
    op.version = 16;  // with entries that return a status
    op.GetName = [](const OrtCustomOp*) { return Described::kName; };
    op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
    op.GetInputType = [](const OrtCustomOp*, std::size_t index) {
      return Described::input_type(index);
    };
    op.GetInputTypeCount = [](const OrtCustomOp*) { return Described::kInputs; };
    op.GetOutputType = [](const OrtCustomOp*, std::size_t index) {
      return Described::output_type(index);
    };
    op.GetOutputTypeCount = [](const OrtCustomOp*) { return Described::kOutputs; };
    op.KernelDestroy = [](void* kernel) { delete static_cast<Described*>(kernel); };
    op.GetInputCharacteristic = [](const OrtCustomOp*, std::size_t index) {
      return Described::is_required(index) ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
    };
    op.GetOutputCharacteristic = [](const OrtCustomOp*, std::size_t index) {
      return Described::is_made(index) ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
    };
    op.GetInputMemoryType = [](const OrtCustomOp*, std::size_t) { return OrtMemTypeDefault; };
    op.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 0; };
    op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
    op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 0; };
    op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
    op.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info,
                           void** kernel) {
      return guarded([&] { *kernel = new Described(info); });
    };
    op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
      return guarded([&] { static_cast<const Described*>(kernel)->compute(context); });
    };
    return op;
  }();
  return description;
}

}  // namespace

OrtStatus* register_operators(OrtSessionOptions* options, const OrtApiBase* base) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (base->GetApi(kOrtApi) == nullptr) {
    const auto create =
        reinterpret_cast<decltype(OrtEntries::CreateStatus)>(entry(base->GetApi(1), 0));
    return create(ORT_FAIL, "the kernels of specrt need ONNX Runtime 1.17 or later");
  }
  static const OrtEntries entries(base->GetApi(kOrtApi));
  if (ort() == nullptr) ort() = &entries;
  if (chosen() == nullptr) {
    const std::string reason = "SPECRT_KERNELS is '" + std::string(forced()) +
                               "'; expected one of those that run here (" + supported() +
                               "), or unset it for the best";
    return entries.CreateStatus(ORT_INVALID_ARGUMENT, reason.c_str());
  }
  static OrtCustomOpDomain* domain = nullptr;
  if (domain == nullptr) {
    OrtCustomOpDomain* made = nullptr;
    if (OrtStatus* status = entries.CreateCustomOpDomain("specrt", &made)) return status;
    for (const OrtCustomOp* op :
         {&described<MatMul>(), &described<Experts>(), &described<Embedding>(),
          &described<AttentionOperator>(), &described<CrossAttention>(), &described<Convolution>(),
          &described<RecurrenceOperator>(), &described<Scores>()})
      if (OrtStatus* status = entries.CustomOpDomain_Add(made, op)) return status;
    domain = made;
  }
  return entries.AddCustomOpDomain(options, domain);
}

}  // namespace specrt::kernels

// libspecrt has the kernels inside, and exports its own interface alone.
#ifndef SPECRT_BUILDING

#define SPECRT_EXPORT extern "C" __attribute__((visibility("default")))

// The names of the instruction sets whose kernels could run here, best first, a space between them.
SPECRT_EXPORT const char* specrt_kernels_supported() {
  return specrt::kernels::supported().c_str();
}

// The name of the instruction set whose kernels run: the best one, or that of SPECRT_KERNELS; null
// where that is none of those supported.
SPECRT_EXPORT const char* specrt_kernels() {
  const specrt::kernels::Kernels* kernels = specrt::kernels::chosen();
  return kernels == nullptr ? nullptr : kernels->name;
}

// What graphs and weights these kernels read, as manifests name it.
SPECRT_EXPORT const char* specrt_kernels_layout() { return specrt::kernels::kLayout; }

// What ONNX Runtime calls to register the operators with the options of a session. Sessions may be
// opened by several threads at once.
SPECRT_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  return specrt::kernels::register_operators(options, base);
}

#endif
