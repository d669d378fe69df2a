// The kernels compiled for AVX-512.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#define FP8_ISA fp8_avx512
#define FP8_WIDTH 512
#include "job.h"
#include "vectors.h"

#include "quantize.inc"
#include "compare.inc"
#endif
