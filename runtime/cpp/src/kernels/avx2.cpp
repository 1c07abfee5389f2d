// AVX2 with FMA: Intel from Haswell, AMD from Zen.
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#include "kernels/instruction_sets.hpp"
#include "kernels/target.hpp"

SPECRT_TARGET("avx2,fma,f16c")

namespace specrt::kernels {
namespace {

#include "kernels/avx2.hpp"
#include "kernels/entry.hpp"

bool supported() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;  // clang 14 has no name for F16C
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

using Vector = Avx2<false>;

}  // namespace

extern const Kernels kAvx2 = kernels_of<Vector>("avx2", supported);

}  // namespace specrt::kernels

SPECRT_TARGET_END
#endif
