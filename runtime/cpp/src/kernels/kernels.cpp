#include "kernels/kernels.hpp"

#include <cstring>

#include "kernels/instruction_sets.hpp"

namespace specrt::kernels {

const Kernels* const* all_kernels() {
  static const Kernels* const all[] = {
#if defined(__x86_64__)
      &kAvx512Vnni, &kAvxVnni, &kAvx2,
#elif defined(__aarch64__)
      &kI8mm, &kDotProd,
#endif
      &kScalar, nullptr};
  return all;
}

const Kernels* find_kernels(const char* name) {
  for (const Kernels* const* entry = all_kernels(); *entry != nullptr; entry++)
    if ((*name == '\0' || std::strcmp(name, (*entry)->name) == 0) && (*entry)->supported())
      return *entry;
  return nullptr;
}

std::size_t attend_floats(const Attention& attention, std::size_t count, std::size_t position) {
  const std::size_t queries = count * (attention.heads / attention.kv_heads);
  return queries * (attention.head_dim + 1 + (position / kTile + 1) * kTile);
}

}  // namespace specrt::kernels
