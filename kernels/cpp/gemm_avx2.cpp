// The GEMM compiled for AVX2.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#pragma GCC optimize("fp-contract=off")
#define FP8_ISA fp8_avx2
#define FP8_WIDTH 256
#include <cstdint>
#include <new>

#include "gemm.h"
#include "vectors.h"

#include "gemm.inc"
#endif
