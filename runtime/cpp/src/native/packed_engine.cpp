#include <algorithm>

#include "native/ort_engine.hpp"

namespace specrt::native {

namespace {

constexpr auto kInt64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;

std::int64_t size_of(std::size_t count) { return static_cast<std::int64_t>(count); }

}  // namespace

PackedEngine::PackedEngine(std::shared_ptr<const SharedSession> session,
                           const OrtSettings& settings)
    : OrtEngine(std::move(session), settings),
      has_positions_(session_->inputs().count("positions") > 0),
      positions_(settings.max_width + 2, sizeof(Token)),
      widths_(static_cast<std::size_t>(settings.batch), sizeof(Token)),
      spread_(settings.max_width + 2 + 2 * static_cast<std::size_t>(settings.batch), sizeof(Token)),
      kept_(settings.max_width + 2, sizeof(Token)) {
  allocate(".0");
  const auto& inputs = session_->inputs();
  const auto has = [&](int row) { return inputs.count("key.0." + std::to_string(row)) > 0; };
  for (const Cache& cache : caches_) {
    const std::string name = cache.name.substr(0, cache.name.size() - 1);
    for (int row = 1; row < settings_.batch; ++row) {
      const auto found = inputs.find(name + std::to_string(row));
      if (found == inputs.end() || found->second.shape != cache.port.shape ||
          found->second.type != caches_[0].port.type || has(settings_.batch))
        throw Failure(SPECRT_ENGINE,
                      "the engine does not have the buffers '" + name + "' of " +
                          std::to_string(settings_.batch) +
                          " rows that its manifest describes: it was built by an earlier version, "
                          "or belongs to another bundle. Build the bundle again");
    }
  }
  const std::vector<std::int64_t>& shape = caches_[0].port.shape;
  std::size_t items = 1;
  for (const std::int64_t size : shape) items *= static_cast<std::size_t>(size);
  nobodys_ = std::make_unique<Buffer>(items, ort_item_bytes(caches_[0].port.type));
}

OrtEngine::Extent PackedEngine::extent(std::size_t width, std::size_t rows) const {
  const bool even = settings_.even;
  std::size_t tokens = std::max(width, places());
  tokens += even && tokens % 2 != 0;
  return {width, rows, tokens, rows + (even && rows % 2 != 0)};
}

std::vector<std::int64_t> PackedEngine::scored_shape(const Extent& extent) const {
  return {1, size_of(extent.scored)};
}

void PackedEngine::bind_more(Binding& binding, const Extent& extent) {
  const auto others = static_cast<std::size_t>(settings_.batch - 1);
  const std::size_t attended = std::max(extent.width, places()) + others * places();
  const std::int64_t tokens = size_of(extent.tokens);
  binding.input("widths", {widths_.get(), kInt64, {settings_.batch}});
  binding.input("spread", {spread_.get(), kInt64, {size_of(attended)}});
  binding.input("kept", {kept_.get(), kInt64, {tokens}});
  if (has_positions_) binding.input("positions", {positions_.get(), kInt64, {1, tokens}});
  for (const Cache& cache : caches_) {
    const std::string name = cache.name.substr(0, cache.name.size() - 1);
    bind_cache(binding, cache.name, cache.memory.get());
    for (int row = 1; row < settings_.batch; ++row)
      bind_cache(binding, name + std::to_string(row), nobodys_->get());
  }
}

void PackedEngine::fill(const Extent& extent, std::size_t start) {
  OrtEngine::fill(extent, start);
  const std::size_t own = std::max(extent.width, places());
  const auto batch = static_cast<std::size_t>(settings_.batch);
  Token* widths = widths_.as<Token>();
  std::fill(widths, widths + batch, size_of(places()));
  widths[0] = size_of(own);
  // Places beyond a row's tokens read its last one again, those of other rows any.
  Token* spread = spread_.as<Token>();
  std::fill(spread, spread + own + (batch - 1) * places(), 0);
  for (std::size_t i = 0; i < own; ++i) spread[i] = size_of(std::min(i, extent.width - 1));
  Token* kept = kept_.as<Token>();
  Token* positions = positions_.as<Token>();
  for (std::size_t i = 0; i < extent.tokens; ++i) {
    const bool fed = i < extent.width;
    kept[i] = fed ? size_of(i) : 0;
    positions[i] = fed ? size_of(start + i) : 0;
  }
}

}  // namespace specrt::native
