#include "native/tensorrt/contract.hpp"

#include "failure.hpp"

namespace specrt::native::tensorrt {

namespace {

using nvinfer1::DataType;

constexpr std::int64_t kAny = -1;

[[noreturn]] void apart(const std::string& found, const std::string& wanted) {
  throw Failure(SPECRT_ENGINE, "the plan " + found + ", and its record and the manifest say " +
                                   wanted + "; they do not belong together: " + kAgain);
}

DataType cache_type(const EngineRecord& record) {
  return record.compute == "fp16"   ? DataType::kHALF
         : record.compute == "bf16" ? DataType::kBF16
                                    : DataType::kFLOAT;
}

std::map<std::string, Tensor> expected(const EngineRecord& record, const Geometry& geometry,
                                       std::size_t max_length) {
  const auto count = static_cast<std::int64_t>(record.candidates);
  std::map<std::string, Tensor> tensors{
      {"input_ids", {{1, kAny}, DataType::kINT64, true}},
      {"start", {{1}, DataType::kINT64, true}},
      {"rows", {{kAny}, DataType::kINT64, true}},
      {"argmax", {{1, kAny}, DataType::kINT64, false}},
      {"logits", {{1, kAny, geometry.vocab_size}, DataType::kFLOAT, false}},
  };
  if (record.confidence) tensors.emplace("confidence", Tensor{{1, kAny}, DataType::kFLOAT, false});
  if (record.candidates != 0) {
    tensors.emplace(kCandidateValues, Tensor{{1, kAny, count}, DataType::kFLOAT, false});
    tensors.emplace(kCandidateIds, Tensor{{1, kAny, count}, DataType::kINT64, false});
  }
  const std::vector<std::int64_t> shape{1, geometry.kv_heads, static_cast<std::int64_t>(max_length),
                                        geometry.head_dim};
  for (const std::string& name : cache_names(geometry)) {
    tensors.emplace(name, Tensor{shape, cache_type(record), true});
    tensors.emplace("present_" + name, Tensor{shape, cache_type(record), false});
  }
  return tensors;
}

// A plan whose profiles all have one size may have it where others have none.
bool same(const Tensor& found, const Tensor& wanted) {
  if (found.type != wanted.type || found.is_input != wanted.is_input ||
      found.shape.size() != wanted.shape.size())
    return false;
  for (std::size_t i = 0; i < found.shape.size(); ++i)
    if (wanted.shape[i] != found.shape[i] && wanted.shape[i] != kAny) return false;
  return true;
}

const char* type_name(DataType type) {
  switch (type) {
    case DataType::kFLOAT:
      return "float32";
    case DataType::kHALF:
      return "float16";
    case DataType::kBF16:
      return "bfloat16";
    case DataType::kINT64:
      return "int64";
    default:
      return "another type";
  }
}

std::string said(const Tensor& tensor) {
  std::string shape;
  for (const std::int64_t size : tensor.shape)
    shape += (shape.empty() ? "" : ", ") + std::to_string(size);
  return std::string(tensor.is_input ? "input" : "output") + " [" + shape + "] of " +
         type_name(tensor.type);
}

void check_tensors(const CompiledPlan& plan, const std::map<std::string, Tensor>& wanted) {
  for (const auto& [name, tensor] : wanted) {
    const auto found = plan.tensors().find(name);
    if (found == plan.tensors().end()) apart("has no tensor " + name, said(tensor));
    if (!same(found->second, tensor))
      apart("has " + name + " as " + said(found->second), said(tensor));
  }
  for (const auto& [name, tensor] : plan.tensors())
    if (wanted.count(name) == 0) apart("has a tensor " + name, "that there is none");
}

std::string listed(const Range& sizes) {
  return std::to_string(sizes.least) + ", " + std::to_string(sizes.best) + ", " +
         std::to_string(sizes.most);
}

void check_range(const CompiledPlan& plan, std::size_t number, const Profile& profile,
                 const std::string& input, const Range& wanted) {
  const Tensor& tensor = plan.tensors().at(input);
  if (tensor.shape.back() != kAny) return;  // one size needs no range
  const Range found = plan.range(static_cast<int>(number), input);
  if (found == wanted) return;
  apart("takes " + input + " of " + listed(found) + " in profile " + std::to_string(number),
        listed(wanted) + " ('" + profile.name + "')");
}

}  // namespace

std::vector<std::string> cache_names(const Geometry& geometry) {
  std::vector<std::string> names;
  for (int i = 0; i < geometry.layers; ++i)
    for (const char* kind : {"key.", "value."}) names.push_back(kind + std::to_string(i));
  return names;
}

void check_plan(const CompiledPlan& plan, const EngineRecord& record, const Geometry& geometry,
                std::size_t max_length) {
  const std::size_t count = record.profiles.size();
  if (static_cast<std::size_t>(plan.profiles()) != count)
    apart("has " + std::to_string(plan.profiles()) + " profiles", std::to_string(count));
  check_tensors(plan, expected(record, geometry, max_length));
  for (std::size_t i = 0; i < count; ++i) {
    const Profile& profile = record.profiles[i];
    check_range(plan, i, profile, "input_ids", profile.width);
    check_range(plan, i, profile, "rows", profile.rows);
  }
  if (!record.native) return;
  for (const std::string& name : cache_names(geometry)) {
    const std::string alias = plan.alias("present_" + name);
    if (!alias.empty() && alias != name)
      apart("writes present_" + name + " into " + alias, "that it goes into " + name);
  }
}

}  // namespace specrt::native::tensorrt
