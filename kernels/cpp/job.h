// What one call of the native kernels reads and writes; filled in by native.py, field by field.
#pragma once

#include <cstdint>

// A format and how scales are chosen: the `grid` array of numba_bits.
struct Grid {
  double maximum, last_kept, multiplier, power_of_two, quantum_shift, least_exponent;
};

// What is wanted of one layout; statistics of every wanted one or of none.
struct Layout {
  int64_t wanted;
  float *scales; // [row blocks, column blocks] or null
  void *output;  // [rows, columns] or null
  double *stats; // [segments, 29], zeros before, or null
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
  Layout row, tile, col;
};
