// NEON with dot products of unsigned and signed bytes: Arm from Neoverse V1, Apple from M2.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "kernels/arm_features.hpp"
#include "kernels/instruction_sets.hpp"
#include "kernels/target.hpp"

#if defined(__clang__)
SPECRT_TARGET("dotprod,i8mm")
#else
SPECRT_TARGET("arch=armv8.2-a+dotprod+i8mm")
#endif

namespace specrt::kernels {
namespace {

#define SPECRT_I8MM
#include "kernels/entry.hpp"
#include "kernels/neon.hpp"

// HWCAP2_I8MM, which headers older than the instructions lack.
bool supported() {
#if defined(__APPLE__)
  return is_reported("hw.optional.arm.FEAT_I8MM");
#else
  return (getauxval(AT_HWCAP2) & 1UL << 13) != 0;
#endif
}

using Vector = Neon<true>;

}  // namespace

extern const Kernels kI8mm =
    kernels_over<kDotProd>("i8mm", supported, multiply_all<Vector>, multiply_only<Vector>);

}  // namespace specrt::kernels

SPECRT_TARGET_END
#endif
