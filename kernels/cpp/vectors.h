// Vectors of one instruction set in GCC's vector types: one source for AVX-512, AVX2 and plain x86.
// FP8_WIDTH is their width in bits, FP8_ISA the namespace that keeps the sets apart.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if FP8_WIDTH >= 256
#include <immintrin.h>
#endif

namespace FP8_ISA {

constexpr int LANES = FP8_WIDTH / 32;
constexpr int HALF = LANES / 2;
constexpr bool HAS_FMA = FP8_WIDTH >= 256;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef double Doubles __attribute__((vector_size(4 * LANES)));
typedef float HalfFloats __attribute__((vector_size(2 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));
typedef uint16_t WideShorts __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

#define FP8_INLINE static inline __attribute__((always_inline))
#define FP8_INLINE_MEMBER inline __attribute__((always_inline))

FP8_INLINE Floats splat(float value) { return Floats{} + value; }
FP8_INLINE Ints splat(int32_t value) { return Ints{} + value; }
FP8_INLINE Doubles splat_double(double value) { return Doubles{} + value; }

FP8_INLINE double larger(double a, double b) { return a > b ? a : b; }
FP8_INLINE Ints larger(Ints a, Ints b) { return a > b ? a : b; }
FP8_INLINE WideShorts larger(WideShorts a, WideShorts b) { return a > b ? a : b; }

// Lanes of `counted`, once more where `condition` holds.
FP8_INLINE Ints count(Ints counted, Ints condition) {
#if FP8_WIDTH == 512
  return (Ints)_mm512_mask_add_epi32((__m512i)counted, _mm512_movepi32_mask((__m512i)condition), (__m512i)counted, _mm512_set1_epi32(1));
#else
  return counted - condition;
#endif
}

// a * b + c, rounded once.
FP8_INLINE Floats fused(Floats a, Floats b, Floats c) {
#if FP8_WIDTH == 512
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif FP8_WIDTH == 256
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  Floats result;
  for (int lane = 0; lane < LANES; lane++) result[lane] = std::fmaf(a[lane], b[lane], c[lane]);
  return result;
#endif
}

FP8_INLINE void widen(Floats x, Doubles *low, Doubles *high) {
#if FP8_WIDTH == 512
  *low = (Doubles)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x));
  *high = (Doubles)_mm512_cvtps_pd((__m256)_mm512_extractf64x4_pd((__m512d)x, 1));
#else
  HalfFloats half[2];
  std::memcpy(half, &x, sizeof half);
  *low = __builtin_convertvector(half[0], Doubles);
  *high = __builtin_convertvector(half[1], Doubles);
#endif
}

FP8_INLINE double total(Doubles x) {
  double sum = x[0];
  for (int lane = 1; lane < HALF; lane++) sum += x[lane];
  return sum;
}

// The sums of four vectors' lanes, as float64.
FP8_INLINE void totals(Floats a, Floats b, Floats c, Floats d, double *out) {
#if FP8_WIDTH == 512
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
  __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  Doubles low, high;
  widen((Floats)abcd, &low, &high);
  __m512d both = (__m512d)(low + high);
  _mm256_storeu_pd(out, _mm256_add_pd(_mm512_castpd512_pd256(both), _mm512_extractf64x4_pd(both, 1)));
#else
  Floats parts[4] = {a, b, c, d};
  for (int part = 0; part < 4; part++) {
    Doubles low, high;
    widen(parts[part], &low, &high);
    out[part] = total(low + high);
  }
#endif
}

FP8_INLINE int64_t total(Ints x) {
#if FP8_WIDTH == 512
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  int64_t sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += x[lane];
  return sum;
#endif
}

FP8_INLINE int32_t largest(Ints x) {
#if FP8_WIDTH == 512
  return _mm512_reduce_max_epi32((__m512i)x);
#else
  int32_t most = x[0];
  for (int lane = 1; lane < LANES; lane++) most = x[lane] > most ? x[lane] : most;
  return most;
#endif
}

// The lanes of a line from its bfloat16 (uint16_t) or float32 (uint32_t) patterns, as float32 bits.
FP8_INLINE Ints load(const uint16_t *line) {
  Shorts pattern;
  std::memcpy(&pattern, line, sizeof pattern);
#if FP8_WIDTH == 512
  return (Ints)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)pattern), 16);
#else
  return (Ints)(__builtin_convertvector(pattern, Words) << 16);
#endif
}

FP8_INLINE Ints load(const uint32_t *line) {
  Ints bits;
  std::memcpy(&bits, line, sizeof bits);
  return bits;
}

FP8_INLINE WideShorts load_shorts(const uint16_t *line) {
  WideShorts patterns;
  std::memcpy(&patterns, line, sizeof patterns);
  return patterns;
}

// Half of the bfloat16 patterns as float32 bits.
FP8_INLINE Ints lower_half(WideShorts patterns) {
  uint16_t line[2 * LANES];
  std::memcpy(line, &patterns, sizeof line);
  return load(line);
}

FP8_INLINE Ints upper_half(WideShorts patterns) {
  uint16_t line[2 * LANES];
  std::memcpy(line, &patterns, sizeof line);
  return load(line + LANES);
}

// The first `count` lanes, zeros behind them.
template <class Pattern> FP8_INLINE Ints load_part(const Pattern *line, int64_t count) {
  if (__builtin_expect(count >= LANES, 1)) return load(line);
  Pattern padded[LANES] = {};
  std::memcpy(padded, line, count * sizeof(Pattern));
  return load(padded);
}

FP8_INLINE void store_bytes(uint8_t *line, Ints values, int64_t count) {
#if FP8_WIDTH == 512
  Bytes bytes = (Bytes)_mm512_cvtepi32_epi8((__m512i)values);
#else
  Bytes bytes = __builtin_convertvector(values, Bytes);
#endif
  if (__builtin_expect(count >= LANES, 1))
    std::memcpy(line, &bytes, LANES);
  else
    std::memcpy(line, &bytes, count);
}

} // namespace FP8_ISA
