// AVX-VNNI: Intel from Alder Lake, AMD from Zen 5.
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#include "kernels/instruction_sets.hpp"
#include "kernels/target.hpp"

SPECRT_TARGET("avx2,avxvnni,fma,f16c")

namespace specrt::kernels {
namespace {

#define SPECRT_AVX_VNNI
#include "kernels/avx2.hpp"
#include "kernels/entry.hpp"

bool supported() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool has_leaf = __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0;
  return has_leaf && (eax & 1U << 4) != 0 && kAvx2.supported();
}

using Vector = Avx2<true>;

}  // namespace

extern const Kernels kAvxVnni =
    kernels_over<kAvx2>("avx-vnni", supported, multiply_all<Vector>, multiply_only<Vector>);

}  // namespace specrt::kernels

SPECRT_TARGET_END
#endif
