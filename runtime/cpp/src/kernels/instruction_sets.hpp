// One entry for each instruction set, in a file of its own.
#pragma once

#include "kernels/kernels.hpp"

namespace specrt::kernels {

#if defined(__x86_64__)
extern const Kernels kAmx, kAvx512Vnni, kAvxVnni, kAvx2;
#elif defined(__aarch64__)
extern const Kernels kI8mm, kDotProd;
#endif
extern const Kernels kScalar;

}  // namespace specrt::kernels
