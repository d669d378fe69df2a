// What the judges of sampled rows read and write; filled in by native_exact.py, field by field.
#pragma once

#include <cstdint>

// Rows of a times b at float32 precision. Strides count elements.
struct ExactJob {
  const void *a;         // bfloat16 or float32 [.., depth]
  int64_t a_is_bfloat16, a_row_stride, a_k_stride;
  const int64_t *places; // [rows] which rows of a, or null: the first ones
  int64_t rows, depth, columns;
  const void *b;         // bfloat16 or float32 [depth, columns], or [columns, depth] where `turned`; its lines are dense
  int64_t b_is_bfloat16, b_stride, turned;
  float *out;            // [rows, columns], dense
};

// A product whose rows of a are ready: any of its columns, on any thread.
class ExactProduct {
public:
  virtual ~ExactProduct() = default;
  // Columns `first` to `last` of the result, `first` a multiple of 16; the largest bits of b among them. Throws std::bad_alloc.
  virtual int32_t sum(int64_t first, int64_t last) const = 0;
  // Whether the result is one, with the largest bits of all b: not for numbers that tiles cannot multiply so.
  virtual bool holds(int32_t most) const = 0;
};

// A result at high precision against the actual one.
struct Comparison {
  const float *exact;    // [rows, columns]
  int64_t exact_stride;
  const void *actual;    // bfloat16 or float32 [.., columns]; its lines are dense
  int64_t actual_is_bfloat16, actual_stride;
  const int64_t *places; // [rows] which rows of it, or null: the first ones
  const float *bias;     // [columns] added to exact, or null
  int64_t rows, columns;
  double *stats;         // [29], zeros before
};
