// What is measured of one use of a weight; filled in by native_use.py, field by field.
#pragma once

#include <cstdint>

#include "job.h"
#include "team.h"

// bfloat16 or float32 [rows, columns] with dense lines. The stride counts elements.
struct Matrix {
  const void *values;
  int64_t is_bfloat16, rows, columns, stride;
};

struct OperandGrid {
  Grid grid;
  int64_t is_e5m2;
  int64_t wide_sums;      // whether all sums of its statistics are float64
};

struct Use {
  Matrix operand, weight; // x [T, K] or dy [T, N], and w [N, K]
  Matrix actual;          // the real result; null where FP8 products take its place
  OperandGrid operand_grid, weight_grid;
  int64_t forward;        // whether the operand is x: the product is x w^T, else dy w
  const int64_t *places;  // [sampled] rows of the result that are recomputed
  int64_t sampled;
  const float *bias;      // [columns of the result] added to the exact product, or null
  const double *edges;    // [15] inner edges of the SQNR histogram, as ratios
  double *stats;          // [4, 29], zeros before: of the operand in rows and in columns, of the weight, of the product
  int64_t wants_row, wants_col, wants_weight;
  uint8_t *codes;         // [N, K] of the weight in tiles: written where its statistics are wanted, else read
  float *scales;
  double *operand_seconds; // what the statistics took
  Team team;
};
