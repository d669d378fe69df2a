// Entry points of the native kernels: plain C, called by name.

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "levels.h"

namespace fp8_amx {
void gemm(const GemmJob &job);
ExactProduct *exact_product(const ExactJob &job);
}
namespace fp8_avx512 {
void quantize(const Job &job);
void compare(const Comparison &job);
void gemm(const GemmJob &job);
}
namespace fp8_avx2 {
void quantize(const Job &job);
void compare(const Comparison &job);
void gemm(const GemmJob &job);
}
namespace fp8_plain {
void quantize(const Job &job);
void compare(const Comparison &job);
void gemm(const GemmJob &job);
}

namespace {

// Whether the processor has bfloat16 tiles (and permutes bytes, as all that have them do) and Linux lets this process use
// them. A process asks once (Documentation/arch/x86/xstate.rst).
bool tiles_allowed() {
#if defined(FP8_HAS_AMX)
  constexpr unsigned VBMI = 1u << 1, BF16 = 1u << 22, TILE = 1u << 24;
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(ecx & VBMI) || !(edx & BF16) || !(edx & TILE)) return false;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return false;
#endif
}

} // namespace

void ask_for_large_pages(const void *start, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t PAGE = 2 << 20;
  uintptr_t first = ((uintptr_t)start + PAGE - 1) / PAGE * PAGE, last = ((uintptr_t)start + bytes) / PAGE * PAGE;
  if (start && bytes >= (int64_t)(2 * PAGE)) madvise((void *)first, last - first, MADV_HUGEPAGE);
#else
  (void)start, (void)bytes;
#endif
}

void quantize(const Job &job, int level) {
#if defined(__x86_64__)
  if (level >= 2) return fp8_avx512::quantize(job);
  if (level == 1) return fp8_avx2::quantize(job);
#endif
  fp8_plain::quantize(job);
}

void gemm(const GemmJob &job, int level) {
#if defined(FP8_HAS_AMX)
  if (level >= 3) return fp8_amx::gemm(job);
#endif
#if defined(__x86_64__)
  if (level >= 2) return fp8_avx512::gemm(job);
  if (level == 1) return fp8_avx2::gemm(job);
#endif
  fp8_plain::gemm(job);
}

void compare(const Comparison &job, int level) {
#if defined(__x86_64__)
  if (level >= 2) return fp8_avx512::compare(job);
  if (level == 1) return fp8_avx2::compare(job);
#endif
  fp8_plain::compare(job);
}

ExactProduct *exact_product(const ExactJob &job, int level) {
#if defined(FP8_HAS_AMX)
  if (level >= 3) return fp8_amx::exact_product(job);
#endif
  (void)job, (void)level;
  return nullptr;
}

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

// Size of a job: a caller that has another in mind was made for another version.
FP8_EXPORT int64_t fp8_native_job_bytes() { return sizeof(Job); }

FP8_EXPORT void fp8_native_quantize(const Job *job, int level) {
  ExactSubnormals exact;
  for (const Layout *layout : {&job->row, &job->tile, &job->col})
    ask_for_large_pages(layout->output, job->bounds[job->segments] * job->columns * (job->output == 2 ? 4 : 1));
  quantize(*job, level);
}

// The same for products: 3 where AMX is there too.
FP8_EXPORT int fp8_native_gemm_level() {
  int level = fp8_native_level();
  return level == 2 && tiles_allowed() ? 3 : level;
}

FP8_EXPORT int64_t fp8_native_gemm_job_bytes() { return sizeof(GemmJob); }

// 0, or 1 where there was not enough memory.
FP8_EXPORT int fp8_native_gemm(const GemmJob *job, int level) {
  ExactSubnormals exact;
  try {
    gemm(*job, level);
    return 0;
  } catch (const std::bad_alloc &) {
    return 1;
  }
}

FP8_EXPORT int64_t fp8_native_exact_job_bytes() { return sizeof(ExactJob) + sizeof(Comparison); }

FP8_EXPORT void fp8_native_compare(const Comparison *job, int level) {
  ExactSubnormals exact;
  compare(*job, level);
}

// 0, or 1 where the rows cannot be multiplied at that level or with those numbers, or there was not enough memory.
FP8_EXPORT int fp8_native_exact_rows(const ExactJob *job, int level) {
  ExactSubnormals exact;
  try {
    std::unique_ptr<ExactProduct> product(exact_product(*job, level));
    return product && product->holds(product->sum(0, job->columns)) ? 0 : 1;
  } catch (const std::bad_alloc &) {
    return 1;
  }
}

}
