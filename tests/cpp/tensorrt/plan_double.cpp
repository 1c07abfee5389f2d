#include "tensorrt/plan_double.hpp"

namespace specrt::doubles {

namespace {

Spec spec_of(const native::Json& json) {
  const auto size = [&](const char* name) { return json.at(name).integer(); };
  Spec spec{size("batch"),
            size("layers"),
            size("kv_heads"),
            size("head_dim"),
            size("vocabulary"),
            size("max_length"),
            size("candidates"),
            size("scratch"),
            json.at("native").boolean(),
            json.at("confidence").boolean(),
            json.at("compute").text(),
            {}};
  for (const native::Json& one : json.at("profiles").items()) {
    std::array<std::int64_t, 6> sizes{};
    for (std::size_t i = 0; i < 6; ++i) sizes[i] = one.items().at(i).integer();
    spec.profiles.push_back(sizes);
  }
  return spec;
}

}  // namespace

std::shared_ptr<Plan> plan_of(const native::Json& json) {
  auto plan = std::make_shared<Plan>();
  const Spec& spec = plan->spec = spec_of(json);
  const auto add = [&](const std::string& name, Tensor tensor) {
    plan->names.push_back(name);
    plan->tensors.emplace(name, std::move(tensor));
  };
  const std::int64_t b = spec.batch;
  add("input_ids", {{b, -1}, DataType::kINT64, true});
  add("start", {{b}, DataType::kINT64, true});
  add("rows", {{-1}, DataType::kINT64, true});
  const DataType kind = spec.compute == "fp32"   ? DataType::kFLOAT
                        : spec.compute == "bf16" ? DataType::kBF16
                                                 : DataType::kHALF;
  for (std::int64_t i = 0; i < spec.layers; ++i)
    for (const char* half : {"key.", "value."}) {
      const std::string name = half + std::to_string(i);
      plan->caches.push_back(name);
      const Tensor cache{{b, spec.kv_heads, spec.max_length, spec.head_dim}, kind, true};
      add(name, cache);
      add("present_" + name, {cache.shape, kind, false});
      if (spec.native) plan->aliases["present_" + name] = name;
    }
  add("logits", {{b, -1, spec.vocabulary}, DataType::kFLOAT, false});
  add("argmax", {{b, -1}, DataType::kINT64, false});
  if (spec.confidence) add("confidence", {{b, -1}, DataType::kFLOAT, false});
  if (spec.candidates != 0) {
    add("candidates.values", {{b, -1, spec.candidates}, DataType::kFLOAT, false});
    add("candidates.ids", {{b, -1, spec.candidates}, DataType::kINT64, false});
  }
  if (const native::Json* more = json.find("more"))  // a tensor that no graph has
    add(more->text(), {{b}, DataType::kINT8, true});
  if (const native::Json* crossed = json.find("crossed")) plan->aliases[crossed->text()] = "key.1";
  plan->on_host = json.find("on_host") != nullptr;
  return plan;
}

}  // namespace specrt::doubles
