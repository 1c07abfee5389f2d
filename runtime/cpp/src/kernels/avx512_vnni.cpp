// AVX-512 with VNNI: Intel from Ice Lake, AMD from Zen 4.
#if defined(__x86_64__)
#if !defined(__clang__)
// GCC 12 takes its own intrinsics for reads of what was never written.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "kernels/instruction_sets.hpp"
#include "kernels/target.hpp"

SPECRT_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")

namespace specrt::kernels {
namespace {

#include "kernels/avx512.hpp"
#include "kernels/entry.hpp"

bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

}  // namespace

extern const Kernels kAvx512Vnni = kernels_of<Avx512>("avx512-vnni", supported);

}  // namespace specrt::kernels

SPECRT_TARGET_END
#endif
