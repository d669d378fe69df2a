// The kernels compiled for any processor.
#define FP8_ISA fp8_plain
#define FP8_WIDTH 128
#include "job.h"
#include "vectors.h"

#include "quantize.inc"
#include "compare.inc"
