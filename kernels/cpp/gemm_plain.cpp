// The GEMM compiled for any processor.
#pragma GCC optimize("fp-contract=off")
#define FP8_ISA fp8_plain
#define FP8_WIDTH 128
#include <cstdint>
#include <new>

#include "gemm.h"
#include "vectors.h"

#include "gemm.inc"
