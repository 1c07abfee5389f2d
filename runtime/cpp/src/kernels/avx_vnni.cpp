// AVX-VNNI: Intel from Alder Lake, AMD from Zen 5.
#if defined(__x86_64__)
#pragma GCC target("avx2,avxvnni,fma,f16c")
#include <cpuid.h>
#include <immintrin.h>

#include "kernels/instruction_sets.hpp"

namespace specrt::kernels {
namespace {

#define SPECRT_AVX_VNNI
#include "kernels/attention.hpp"
#include "kernels/avx2.hpp"
#include "kernels/limits.hpp"

bool supported() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool has_leaf = __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0;
  return has_leaf && (eax & 1U << 4) != 0 && kAvx2.supported();
}

using Vector = Avx2<true>;

}  // namespace

extern const Kernels kAvxVnni{"avx-vnni",
                              supported,
                              quantize_rows<Vector>,
                              multiply_all<Vector>,
                              multiply_all_floats<Vector>,
                              append_token,
                              attend_tokens<Vector>,
                              read_all<Vector>,
                              multiply_only<Vector>};

}  // namespace specrt::kernels
#endif
