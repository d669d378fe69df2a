// The kernels compiled for AVX2.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define FP8_ISA fp8_avx2
#define FP8_WIDTH 256
#include "job.h"
#include "vectors.h"

#include "quantize.inc"
#include "compare.inc"
#endif
