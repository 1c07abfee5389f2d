// NEON with dot products of bytes: Arm from Cortex-A75 and Neoverse N1.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "kernels/arm_features.hpp"
#include "kernels/instruction_sets.hpp"
#include "kernels/target.hpp"

#if defined(__clang__)
SPECRT_TARGET("dotprod")
#else
SPECRT_TARGET("arch=armv8.2-a+dotprod")
#endif

namespace specrt::kernels {
namespace {

#include "kernels/entry.hpp"
#include "kernels/neon.hpp"

// HWCAP_ASIMDDP, which headers older than the instructions lack.
bool supported() {
#if defined(__APPLE__)
  return is_reported("hw.optional.arm.FEAT_DotProd");
#else
  return (getauxval(AT_HWCAP) & 1UL << 20) != 0;
#endif
}

using Vector = Neon<false>;

}  // namespace

extern const Kernels kDotProd = kernels_of<Vector>("dotprod", supported);

}  // namespace specrt::kernels

SPECRT_TARGET_END
#endif
