// The operators of domain `specrt`, for ONNX Runtime on a CPU.
//
//   MatMul(x, weights (, bias)) -> y
//     x [..., inputs] fp32; weights bytes as `Weights` says, the scales behind the values; bias fp32
//     [tiles * 16]; y [..., outputs], or [..., outputs / 2] with an activation
//     attributes: N outputs, K inputs, block_size; format: int4, int8, bf16, fp16, fp32; activation: none,
//     silu, gelu
//
// Work is divided among the threads of the session.
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/kernels.hpp"
#include "kernels/onnxruntime.hpp"

namespace specrt::kernels {
namespace {

// The interface that operators call: that of the library that registered them.
const Ort*& ort() {
  static const Ort* entries = nullptr;
  return entries;
}

const Kernels& kernels() {
  static const Kernels* chosen = [] {
    const char* name = std::getenv("SPECRT_KERNELS");
    const Kernels* found = find_kernels(name == nullptr ? "" : name);
    return found == nullptr ? find_kernels("") : found;
  }();
  return *chosen;
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

std::string text(const OrtKernelInfo* info, const char* name) {
  std::size_t size = 0;
  OrtStatus* status = ort()->KernelInfoGetAttribute_string(info, name, nullptr, &size);
  if (status != nullptr) ort()->ReleaseStatus(status);  // older versions call this an error
  std::string value(size, '\0');
  check(ort()->KernelInfoGetAttribute_string(info, name, value.data(), &size));
  value.resize(std::strlen(value.c_str()));
  return value;
}

struct Tensor {
  const void* data;
  std::vector<std::int64_t> shape;

  std::size_t items() const {
    std::size_t count = 1;
    for (const std::int64_t size : shape) count *= static_cast<std::size_t>(size);
    return count;
  }
};

Tensor input(const OrtKernelContext* context, std::size_t index) {
  const OrtValue* value = nullptr;
  check(ort()->KernelContext_GetInput(context, index, &value));
  if (value == nullptr) return {nullptr, {}};
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(ort()->GetTensorTypeAndShape(value, &info));
  const std::unique_ptr<OrtTensorTypeAndShapeInfo, void (*)(OrtTensorTypeAndShapeInfo*)> owner(
      info, ort()->ReleaseTensorTypeAndShapeInfo);
  Tensor tensor{};
  std::size_t axes = 0;
  check(ort()->GetDimensionsCount(info, &axes));
  tensor.shape.resize(axes);
  check(ort()->GetDimensions(info, tensor.shape.data(), axes));
  void* data = nullptr;
  check(ort()->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  tensor.data = data;
  return tensor;
}

float* output(OrtKernelContext* context, std::size_t index, const std::vector<std::int64_t>& shape) {
  OrtValue* value = nullptr;
  check(ort()->KernelContext_GetOutput(context, index, shape.data(), shape.size(), &value));
  void* data = nullptr;
  check(ort()->GetTensorMutableData(value, &data));
  return static_cast<float*>(data);
}

// Run `body(0)` to `body(parts - 1)` on the session's threads.
template <class Body>
void parallel(const OrtKernelContext* context, std::size_t parts, const Body& body) {
  if (parts == 1) return body(0);
  const auto run = [](void* data, std::size_t part) { (*static_cast<const Body*>(data))(part); };
  check(ort()->KernelContext_ParallelFor(context, run, parts, 0, const_cast<Body*>(&body)));
}

// Bytes of weights for which another thread is worth waking.
constexpr std::size_t kPartBytes = 128 << 10;
// Rows that one part quantizes.
constexpr std::size_t kPartRows = 16;

class MatMul {
 public:
  static constexpr const char* kName = "MatMul";
  static constexpr std::size_t kInputs = 3, kRequired = 2, kOutputs = 1;
  static ONNXTensorElementDataType input_type(std::size_t index) {
    return index == 1 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }

  explicit MatMul(const OrtKernelInfo* info) {
    weights_.outputs = static_cast<std::size_t>(integer(info, "N"));
    weights_.inputs = static_cast<std::size_t>(integer(info, "K"));
    weights_.block = static_cast<std::size_t>(integer(info, "block_size"));
    weights_.format = format(text(info, "format"));
    activation_ = activation(text(info, "activation"));
    const bool in_blocks = weights_.format == Format::int4 || weights_.format == Format::int8;
    const std::size_t block = weights_.block;
    if (weights_.outputs == 0 || weights_.inputs == 0 || in_blocks != (block > 0) ||
        (in_blocks && (block % kTile != 0 || weights_.inputs % block != 0)))
      throw std::runtime_error("specrt.MatMul has weights [" + std::to_string(weights_.outputs) +
                               ", " + std::to_string(weights_.inputs) + "] in blocks of " +
                               std::to_string(block) + ", which it cannot multiply with");
  }

  void compute(OrtKernelContext* context) const {
    const Tensor x = input(context, 0), values = input(context, 1), bias = input(context, 2);
    if (x.shape.empty() || static_cast<std::size_t>(x.shape.back()) != weights_.inputs ||
        values.items() != bytes())
      throw std::runtime_error("specrt.MatMul got inputs of another size than its attributes say");
    Weights weights = weights_;
    weights.values = static_cast<const std::uint8_t*>(values.data);
    weights.scales = reinterpret_cast<const std::uint16_t*>(weights.values + value_bytes());
    const std::size_t rows = x.items() / weights.inputs;
    std::vector<std::int64_t> shape = x.shape;
    const bool paired = activation_ != Activation::none;
    shape.back() = static_cast<std::int64_t>(paired ? weights.outputs / 2 : weights.outputs);
    const Output result{output(context, 0, shape), static_cast<std::size_t>(shape.back()),
                        static_cast<const float*>(bias.data), activation_};
    if (rows > 0) multiply(context, weights, static_cast<const float*>(x.data), rows, result);
  }

 private:
  static Format format(const std::string& name) {
    if (name == "int4") return Format::int4;
    if (name == "int8") return Format::int8;
    if (name == "bf16") return Format::bf16;
    if (name == "fp16") return Format::fp16;
    if (name == "fp32") return Format::fp32;
    throw std::runtime_error("specrt.MatMul has weights of format '" + name +
                             "'; expected int4, int8, bf16, fp16 or fp32");
  }
  static Activation activation(const std::string& name) {
    if (name == "none") return Activation::none;
    if (name == "silu") return Activation::silu;
    if (name == "gelu") return Activation::gelu;
    throw std::runtime_error("specrt.MatMul has the activation '" + name +
                             "'; expected none, silu or gelu");
  }

  std::size_t value_bytes() const {
    const std::size_t items = weights_.tiles() * kTile * weights_.inputs;
    switch (weights_.format) {
      case Format::int4:
        return items / 2;
      case Format::int8:
        return items;
      case Format::fp32:
        return items * 4;
      default:
        return items * 2;
    }
  }
  std::size_t bytes() const {
    if (weights_.block == 0) return value_bytes();
    return value_bytes() + weights_.tiles() * kTile * (weights_.inputs / weights_.block) * 2;
  }

  void multiply(OrtKernelContext* context, const Weights& weights, const float* x,
                std::size_t rows, const Output& result) const {
    const std::size_t pairs = (weights.tiles() + 3) / 4;  // of tiles that one part may not split
    const std::size_t wanted = bytes() / kPartBytes + 1;
    const std::size_t parts = wanted < pairs ? wanted : pairs;
    const auto first = [&](std::size_t part) {
      const std::size_t tile = pairs * part / parts * 4;
      return tile < weights.tiles() ? tile : weights.tiles();
    };
    if (weights.block == 0) {
      parallel(context, parts, [&](std::size_t part) {
        kernels().multiply_floats(weights, x, rows, first(part), first(part + 1), result);
      });
      return;
    }
    const QuantizedRows quantized = reserve(rows, weights);
    const std::size_t shares = (rows + kPartRows - 1) / kPartRows;
    parallel(context, shares, [&](std::size_t share) {
      const std::size_t begin = share * kPartRows, blocks = weights.inputs / weights.block;
      const std::size_t count = rows - begin < kPartRows ? rows - begin : kPartRows;
      kernels().quantize(x + begin * weights.inputs, count, weights.inputs, weights.block,
                         {quantized.codes + begin * weights.inputs,
                          quantized.scales + begin * blocks, quantized.sums + begin * blocks});
    });
    parallel(context, parts, [&](std::size_t part) {
      kernels().multiply(weights, quantized, rows, first(part), first(part + 1), result);
    });
  }

  // Memory of this thread for quantized rows; what was there is overwritten.
  static QuantizedRows reserve(std::size_t rows, const Weights& weights) {
    thread_local std::vector<std::int8_t> codes;
    thread_local std::vector<float> scales;
    thread_local std::vector<std::int32_t> sums;
    const std::size_t blocks = rows * (weights.inputs / weights.block);
    if (codes.size() < rows * weights.inputs) codes.resize(rows * weights.inputs);
    if (scales.size() < blocks) scales.resize(blocks), sums.resize(blocks);
    return {codes.data(), scales.data(), sums.data()};
  }

  Weights weights_{};
  Activation activation_{};
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

template <class Operator>
const OrtCustomOp& described() {
  static const OrtCustomOp description = [] {
    OrtCustomOp op{};
    op.version = kOrtCustomOp;
    op.GetName = [](const OrtCustomOp*) { return Operator::kName; };
    op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
    op.GetInputType = [](const OrtCustomOp*, std::size_t index) {
      return Operator::input_type(index);
    };
    op.GetInputTypeCount = [](const OrtCustomOp*) { return Operator::kInputs; };
    op.GetOutputType = [](const OrtCustomOp*, std::size_t) {
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    };
    op.GetOutputTypeCount = [](const OrtCustomOp*) { return Operator::kOutputs; };
    op.KernelDestroy = [](void* kernel) { delete static_cast<Operator*>(kernel); };
    op.GetInputCharacteristic = [](const OrtCustomOp*, std::size_t index) {
      return index < Operator::kRequired ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
    };
    op.GetOutputCharacteristic = [](const OrtCustomOp*, std::size_t) {
      return INPUT_OUTPUT_REQUIRED;
    };
    op.GetInputMemoryType = [](const OrtCustomOp*, std::size_t) { return OrtMemTypeDefault; };
    op.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 0; };
    op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
    op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 0; };
    op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
    op.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info,
                           void** kernel) {
      return guarded([&] { *kernel = new Operator(info); });
    };
    op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
      return guarded([&] { static_cast<const Operator*>(kernel)->compute(context); });
    };
    return op;
  }();
  return description;
}

}  // namespace
}  // namespace specrt::kernels

// The name of the instruction set whose kernels run here.
extern "C" __attribute__((visibility("default"))) const char* specrt_kernels() {
  return specrt::kernels::kernels().name;
}

// What ONNX Runtime calls to register the operators with the options of a session.
extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(
    OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace specrt::kernels;
  static const Ort entries(base->GetApi(kOrtApi));
  ort() = &entries;
  static OrtCustomOpDomain* domain = nullptr;
  if (domain == nullptr) {
    if (OrtStatus* status = entries.CreateCustomOpDomain("specrt", &domain)) return status;
    if (OrtStatus* status = entries.CustomOpDomain_Add(domain, &described<MatMul>())) return status;
  }
  return entries.AddCustomOpDomain(options, domain);
}
