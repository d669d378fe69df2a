// Entry points of the native kernels: plain C, called by name.

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "job.h"

namespace fp8_avx512 {
void quantize(const Job &job);
}
namespace fp8_avx2 {
void quantize(const Job &job);
}
namespace fp8_plain {
void quantize(const Job &job);
}

namespace {

// Subnormals are data here: whatever the caller has told the processor to flush is honoured again afterwards.
class ExactSubnormals {
#if defined(__x86_64__)
  unsigned before = _mm_getcsr();

public:
  ExactSubnormals() { _mm_setcsr(before & ~0x8040u); }
  ~ExactSubnormals() { _mm_setcsr(before); }
#endif
};

} // namespace

#define FP8_EXPORT __attribute__((visibility("default")))

extern "C" {

// Best instruction set of this processor: 2 AVX-512, 1 AVX2, 0 neither.
FP8_EXPORT int fp8_native_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
  return 0;
}

FP8_EXPORT void fp8_native_quantize(const Job *job, int level) {
  ExactSubnormals exact;
#if defined(__x86_64__)
  if (level >= 2) return fp8_avx512::quantize(*job);
  if (level == 1) return fp8_avx2::quantize(*job);
#endif
  fp8_plain::quantize(*job);
}

}
