// What one call of the native kernels reads and writes; filled in by native.py, field by field.
#pragma once

#include <cstdint>

// A format and how scales are chosen: the `grid` array of numba_bits.
struct Grid {
  double maximum, last_kept, multiplier, power_of_two, quantum_shift, least_exponent;
};

struct Job {
  const void *x;         // bfloat16 or float32 [rows, columns]
  int64_t is_bfloat16;
  int64_t columns;
  int64_t stride;        // elements from one row to the next
  const int64_t *bounds; // [segments + 1] first rows: no block crosses one
  int64_t segments;
  Grid grid;
  const double *edges;   // [15] inner edges of the SQNR histogram, as ratios
  int64_t wide_sums;     // whether all sums are float64
  int64_t output;        // 0: nothing, 1: codes (uint8), 2: codes times scales (float32)
  int64_t block_rows;    // 1: row blocks, 128: tiles, 0: none of them
  int64_t with_columns;  // whether col blocks are wanted
  float *block_scales;   // [row blocks, column blocks] or null
  void *block_output;    // [rows, columns] or null
  double *block_stats;   // [segments, 29], zeros before, or null
  float *col_scales;     // [row blocks of 128, columns] or null
  void *col_output;      // [rows, columns] or null
  double *col_stats;     // [segments, 29], zeros before, or null
};
