// The float64 vector of TensorStats.
#pragma once

// Its places. The last sixteen are the histogram's.
enum { COUNT, ZEROS, UNDERFLOW_, SATURATED, NAN_, INF_, ROWS_, FLUSHED, AMAX, SUM_SQ, SUM_SQ_Q, SUM_SQ_ERR, SUM_4TH, HISTOGRAM };
constexpr int VECTOR_LENGTH = 29, EDGES = 15;

// Knuth's two-sum: the number of values does not add to the error. `low` is what rounding has dropped so far.
static inline void add_exactly(double &sum, double &low, double value) {
  double before = sum, after = before + value, part = after - before;
  low += (before - (after - part)) + (value - part);
  sum = after;
}
