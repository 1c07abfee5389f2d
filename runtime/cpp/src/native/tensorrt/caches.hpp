// The KV buffers of one engine, and how a context is bound to them.
#pragma once

#include <string>
#include <vector>

#include "native/engine.hpp"
#include "native/tensorrt/context.hpp"
#include "native/tensorrt/cuda.hpp"
#include "native/tensorrt/record.hpp"

namespace specrt::native::tensorrt {

// One set of KV buffers that every pass updates in place, or two that swap after each. All are
// cleared, because attention may read what it then multiplies by 0.
class Caches {
 public:
  Caches(const EngineRecord& record, const Geometry& geometry, std::size_t max_length,
         const Stream& stream);

  // Which set the next pass reads; always 0 where there is one.
  std::size_t parity() const { return parity_; }
  // Let a context read the set of the next pass, and write the other, or the same if there is one.
  void bind(Context& context) const;
  // Note that a pass has written the other set.
  void swap() { parity_ = (parity_ + 1) % sets_; }

 private:
  void* place(std::size_t set, std::size_t name) const;

  std::vector<std::string> names_, written_;
  std::size_t sets_;
  std::size_t each_;
  std::size_t parity_ = 0;
  DeviceMemory memory_;
};

}  // namespace specrt::native::tensorrt
