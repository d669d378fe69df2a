// The GEMM compiled for AMX and AVX-512.
#include "exact.h"
#include "gemm.h"
#if defined(FP8_HAS_AMX)
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vbmi,avx512dq,avx512vl,fma,prefer-vector-width=512")
#pragma GCC optimize("fp-contract=off")
#define FP8_AMX
#define FP8_ISA fp8_amx
#define FP8_WIDTH 512
#include <new>

#include "vectors.h"

#include "gemm.inc"
#include "products_exact.inc"
#endif
