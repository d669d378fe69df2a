// What one call of the native GEMM reads and writes; filled in by native_gemm.py, field by field.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__linux__) && __GNUC__ >= 11
#define FP8_HAS_AMX
#endif

// A matrix of FP8 codes whose dimension k is summed, and its scales. Strides count elements.
struct GemmOperand {
  const uint8_t *codes;       // [rows, k] of the first expert
  int64_t row_stride, k_stride, expert_stride;
  int64_t is_e5m2;
  const float *scales;        // [row blocks, k blocks] of the first expert
  int64_t scale_row_stride, scale_k_stride, scale_expert_stride;
  int64_t rows_per_scale;     // 1 or 128
};

// Rows of a with one expert's b, along one stretch of k.
struct GemmGroup {
  int64_t first_row, last_row, b_expert, out_expert, first_segment, last_segment;
};

// At most 128 of k with one scale each in a and b.
struct GemmSegment {
  int64_t first, last, a_block, b_block;
};

struct GemmJob {
  GemmOperand a, b;
  int64_t columns;            // rows of b: columns of the result
  void *out;                  // bfloat16 or float32 [rows, columns] of the first expert
  int64_t out_is_bfloat16, out_stride, out_expert_stride;
  int64_t accumulate;         // whether the product is added to out
  const GemmGroup *groups;
  int64_t group_count;
  const GemmSegment *segments;
};
