// Stand-in for the header of this name: as a TensorRT 10.3, unless the compiler is told otherwise.
// STAND_IN_RTX makes it TensorRT for RTX, STAND_IN_ALIASES a TensorRT that updates KV buffers in
// place (10.15 and later).
#pragma once

#ifdef STAND_IN_RTX
#define TRT_MAJOR_RTX 1
#define TRT_MINOR_RTX 7
#define STAND_IN_ALIASES
#else
#define NV_TENSORRT_MAJOR 10
#define NV_TENSORRT_MINOR 3
#endif
