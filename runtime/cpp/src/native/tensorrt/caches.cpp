#include "native/tensorrt/caches.hpp"

#include "native/tensorrt/contract.hpp"

namespace specrt::native::tensorrt {

namespace {

std::size_t bytes_of(const EngineRecord& record, const Geometry& geometry, std::size_t length) {
  return aligned(product({static_cast<std::size_t>(geometry.kv_heads), length,
                          static_cast<std::size_t>(geometry.head_dim), record.kv_item_bytes()}));
}

}  // namespace

Caches::Caches(const EngineRecord& record, const Geometry& geometry, std::size_t max_length,
               const Stream& stream)
    : names_(cache_names(geometry)),
      sets_(record.native ? 1 : 2),
      each_(bytes_of(record, geometry, max_length)),
      memory_(product({sets_, names_.size(), each_}), "KV buffers", stream) {
  for (const std::string& name : names_) written_.push_back("present_" + name);
}

void Caches::bind(Context& context) const {
  for (std::size_t i = 0; i < names_.size(); ++i) {
    context.address(names_[i].c_str(), place(parity_, i));
    context.address(written_[i].c_str(), place((parity_ + 1) % sets_, i));
  }
}

void* Caches::place(std::size_t set, std::size_t name) const {
  return memory_.at((set * names_.size() + name) * each_);
}

}  // namespace specrt::native::tensorrt
