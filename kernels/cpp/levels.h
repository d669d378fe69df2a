// The kernels on whatever the processor has: level 3 matrix tiles (products alone), 2 AVX-512, 1 AVX2, 0 neither.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "exact.h"
#include "gemm.h"
#include "job.h"

// Subnormals are data here: whatever the caller has told the processor to flush is honoured again afterwards. A setting of
// the thread: every thread that calls a kernel needs its own.
class ExactSubnormals {
#if defined(__x86_64__)
  unsigned before = _mm_getcsr();

public:
  ExactSubnormals() { _mm_setcsr(before & ~0x8040u); }
  ~ExactSubnormals() { _mm_setcsr(before); }
#endif
};

// Large outputs are mostly memory that nobody has touched yet: in pages of 2 MiB that takes far fewer faults.
void ask_for_large_pages(const void *start, int64_t bytes);

void quantize(const Job &job, int level);
void gemm(const GemmJob &job, int level); // throws std::bad_alloc
void compare(const Comparison &job, int level);
ExactProduct *exact_product(const ExactJob &job, int level); // null without matrix tiles; throws std::bad_alloc
