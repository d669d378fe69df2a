// Vectors of one instruction set in GCC's vector types: one source for AVX-512, AVX2 and plain x86.
// FP8_WIDTH is their width in bits, FP8_ISA the namespace that keeps the sets apart.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if FP8_WIDTH >= 256
#include <immintrin.h>
#endif

namespace FP8_ISA {

constexpr int LANES = FP8_WIDTH / 32;
constexpr int HALF = LANES / 2;
constexpr bool HAS_FMA = FP8_WIDTH >= 256;
constexpr int32_t INFINITY_BITS = 0x7F800000; // of a float32
constexpr int32_t MAGNITUDE_MASK = 0x7FFFFFFF;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef double Doubles __attribute__((vector_size(4 * LANES)));
typedef float HalfFloats __attribute__((vector_size(2 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));
typedef uint16_t WideShorts __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef uint8_t GroupBytes __attribute__((vector_size(2 * LANES)));
typedef int64_t Longs __attribute__((vector_size(4 * LANES)));

#define FP8_INLINE static inline __attribute__((always_inline))
#define FP8_INLINE_MEMBER inline __attribute__((always_inline))

FP8_INLINE Floats splat(float value) { return value - Floats{}; } // a zero added would make a sum of it: -0 + 0 is 0
FP8_INLINE Ints splat(int32_t value) { return Ints{} + value; }

FP8_INLINE double larger(double a, double b) { return a > b ? a : b; }
FP8_INLINE Ints larger(Ints a, Ints b) { return a > b ? a : b; }
FP8_INLINE WideShorts larger(WideShorts a, WideShorts b) { return a > b ? a : b; }
FP8_INLINE Ints smaller(Ints a, Ints b) { return a < b ? a : b; }
FP8_INLINE WideShorts smaller(WideShorts a, WideShorts b) { return a < b ? a : b; }

// Lanes of `counted`, once more where `condition` holds.
FP8_INLINE Ints count(Ints counted, Ints condition) {
#if FP8_WIDTH == 512
  return (Ints)_mm512_mask_add_epi32((__m512i)counted, _mm512_movepi32_mask((__m512i)condition), (__m512i)counted, _mm512_set1_epi32(1));
#else
  return counted - condition;
#endif
}

FP8_INLINE Longs count(Longs counted, Longs condition) {
#if FP8_WIDTH == 512
  return (Longs)_mm512_mask_add_epi64((__m512i)counted, _mm512_movepi64_mask((__m512i)condition), (__m512i)counted, _mm512_set1_epi64(1));
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

// a * b + c where a * b is exact.
FP8_INLINE Floats multiplied_exactly(Floats a, Floats b, Floats c) { return HAS_FMA ? fused(a, b, c) : a * b + c; }

// x >> places with one instruction, which takes the places from a vector.
FP8_INLINE Ints shifted_right(Ints x, int32_t places) {
#if FP8_WIDTH == 512
  return (Ints)_mm512_srav_epi32((__m512i)x, _mm512_set1_epi32(places));
#else
  return x >> places;
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

FP8_INLINE Doubles widen_half(const float *line) {
  HalfFloats half;
  std::memcpy(&half, line, sizeof half);
  return __builtin_convertvector(half, Doubles);
}

FP8_INLINE bool everywhere(Longs condition) {
#if FP8_WIDTH == 512
  return _mm512_movepi64_mask((__m512i)condition) == 0xFF;
#else
  for (int lane = 0; lane < HALF; lane++)
    if (!condition[lane]) return false;
  return true;
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

FP8_INLINE int32_t smallest(Ints x) {
#if FP8_WIDTH == 512
  return _mm512_reduce_min_epi32((__m512i)x);
#else
  int32_t least = x[0];
  for (int lane = 1; lane < LANES; lane++) least = x[lane] < least ? x[lane] : least;
  return least;
#endif
}

FP8_INLINE int32_t smallest(WideShorts x) {
#if FP8_WIDTH >= 256
#if FP8_WIDTH == 512
  __m256i half = _mm256_min_epu16(_mm512_castsi512_si256((__m512i)x), _mm512_extracti64x4_epi64((__m512i)x, 1));
#else
  __m256i half = (__m256i)x;
#endif
  __m128i quarter = _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  return _mm_cvtsi128_si32(_mm_minpos_epu16(quarter)) & 0xFFFF;
#else
  int32_t least = x[0];
  for (int lane = 1; lane < 2 * LANES; lane++) least = x[lane] < least ? x[lane] : least;
  return least;
#endif
}

FP8_INLINE int32_t largest(WideShorts x) { return 0xFFFF - smallest(~x); }

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

FP8_INLINE Floats load(const float *line) {
  Floats values;
  std::memcpy(&values, line, sizeof values);
  return values;
}

FP8_INLINE Doubles load(const double *line) {
  Doubles values;
  std::memcpy(&values, line, sizeof values);
  return values;
}

template <class Vector, class Element> FP8_INLINE void store(Element *line, Vector values) { std::memcpy(line, &values, sizeof values); }

// 64 bytes from the first-level cache; past the others where `stream` says that they would only be in the way.
FP8_INLINE void copy_line(uint8_t *to, const uint8_t *from, bool stream) {
#if FP8_WIDTH == 512
  if (stream) return _mm512_stream_si512((__m512i *)to, _mm512_loadu_si512(from));
#elif FP8_WIDTH == 256
  if (stream) {
    _mm256_stream_si256((__m256i *)to, _mm256_loadu_si256((const __m256i *)from));
    return _mm256_stream_si256((__m256i *)to + 1, _mm256_loadu_si256((const __m256i *)from + 1));
  }
#endif
  (void)stream;
  std::memcpy(to, from, 64);
}

// Streamed lines are seen by everybody from here on.
FP8_INLINE void end_of_stream() {
#if FP8_WIDTH >= 256
  _mm_sfence();
#endif
}

// Lanes 0, 2, 4, ... (half 0) or 1, 3, 5, ... (half 1) of two vectors.
template <class Vector> FP8_INLINE Vector every_second(Vector low, Vector high, int half) {
  Ints places;
  for (int lane = 0; lane < LANES; lane++) places[lane] = 2 * lane + half;
  return __builtin_shuffle(low, high, places);
}

// GROUP columns of a line, bfloat16 (uint16_t) or float32 (uint32_t), as two vectors: of bfloat16 the even columns and the
// odd ones, which takes no shuffle, of float32 the first and the last.
constexpr int GROUP = 2 * LANES;

template <class Pattern> struct Group;

template <> struct Group<uint16_t> {
  Ints pairs;
  FP8_INLINE_MEMBER explicit Group(const uint16_t *line) { std::memcpy(&pairs, line, sizeof pairs); }
  FP8_INLINE_MEMBER Ints first() const { return (pairs & 0x7FFF7FFF) << 16; }
  FP8_INLINE_MEMBER Ints second() const { return pairs & 0x7FFF0000; }
  FP8_INLINE_MEMBER Ints first_signed() const { return pairs << 16; }
  FP8_INLINE_MEMBER Ints second_signed() const { return pairs & (int32_t)0xFFFF0000; }

  // Low bytes, `offset` less, with the signs of x.
  FP8_INLINE_MEMBER void store_codes(uint8_t *line, Ints a, Ints b, int32_t offset) const {
    WideShorts words = (WideShorts)((a & 0xFFFF) | (b << 16)) - (uint16_t)offset;
    words |= ((WideShorts)pairs >> 8) & (uint16_t)0x80;
#if FP8_WIDTH == 512
    __m256i bytes = _mm512_cvtepi16_epi8((__m512i)words);
#else
    auto bytes = __builtin_convertvector(words, GroupBytes);
#endif
    std::memcpy(line, &bytes, sizeof bytes);
  }

  FP8_INLINE_MEMBER void store_values(float *line, Ints a, Ints b) const {
    Ints low, high;
    a |= (pairs << 16) & ~0x7FFFFFFF;
    b |= pairs & ~0x7FFFFFFF;
    for (int lane = 0; lane < LANES; lane++) {
      low[lane] = lane / 2 + lane % 2 * LANES;
      high[lane] = low[lane] + HALF;
    }
    store(line, __builtin_shuffle(a, b, low));
    store(line + LANES, __builtin_shuffle(a, b, high));
  }
};

template <> struct Group<uint32_t> {
  Ints a, b;
  FP8_INLINE_MEMBER explicit Group(const uint32_t *line) : a(load(line)), b(load(line + LANES)) {}
  FP8_INLINE_MEMBER Ints first() const { return a & 0x7FFFFFFF; }
  FP8_INLINE_MEMBER Ints second() const { return b & 0x7FFFFFFF; }
  FP8_INLINE_MEMBER Ints first_signed() const { return a; }
  FP8_INLINE_MEMBER Ints second_signed() const { return b; }

  FP8_INLINE_MEMBER static void store_bytes(uint8_t *line, Ints values) {
#if FP8_WIDTH == 512
    Bytes bytes = (Bytes)_mm512_cvtepi32_epi8((__m512i)values);
#else
    Bytes bytes = __builtin_convertvector(values, Bytes);
#endif
    std::memcpy(line, &bytes, sizeof bytes);
  }

  FP8_INLINE_MEMBER void store_codes(uint8_t *line, Ints low, Ints high, int32_t offset) const {
    store_bytes(line, (low - offset) | ((a >> 24) & 0x80));
    store_bytes(line + LANES, (high - offset) | ((b >> 24) & 0x80));
  }

  FP8_INLINE_MEMBER void store_values(float *line, Ints low, Ints high) const {
    store(line, low | (a & ~0x7FFFFFFF));
    store(line + LANES, high | (b & ~0x7FFFFFFF));
  }
};

} // namespace FP8_ISA
