// Vectors of 64 bytes, with the instructions that CPUs with AVX-512 have for them, and those with AVX2 alone.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

namespace {

constexpr int LANES = 16, BYTES = 64;  // of a vector

typedef uint8_t Bytes __attribute__((vector_size(64)));
typedef uint16_t Pairs __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));
typedef int8_t Levels __attribute__((vector_size(16)));
typedef uint16_t Halves __attribute__((vector_size(32)));

template <class V> INLINE V load(const void *from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}

template <class V> INLINE void store(void *to, V v) { memcpy(to, &v, sizeof v); }

INLINE Ints all(int32_t x) { return x - Ints{}; }

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

INLINE Ints dot(Ints sum, Bytes code, int32_t four) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)code, _mm512_set1_epi32(four));
}
// The sum of N vectors' products, of codes of BITS bits.
template <int BITS, int N> INLINE Ints dots(Ints sum, const Bytes *code, const char *four) {
  UNROLL for (int v = 0; v < N; ++v) sum = dot(sum, code[v], load<int32_t>(four + 4 * v));
  return sum;
}
INLINE Bytes look_up(Bytes table, Bytes code) { return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)code); }
INLINE Floats widen(Halves x) { return (Floats)_mm512_cvtph_ps((__m256i)x); }
INLINE Halves narrow(Floats x) { return (Halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT); }
INLINE Ints widen(Levels x) { return (Ints)_mm512_cvtepi8_epi32((__m128i)x); }
INLINE Levels narrow(Ints x) { return (Levels)_mm512_cvtepi32_epi8((__m512i)x); }
INLINE Words upper(Halves x) { return (Words)_mm512_cvtepu16_epi32((__m256i)x) << 16; }
INLINE Halves upper(Words x) { return (Halves)_mm512_cvtepi32_epi16((__m512i)(x >> 16)); }
INLINE float total(Floats x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE int32_t total(Ints x) { return _mm512_reduce_add_epi32((__m512i)x); }
INLINE int32_t most(Ints x) { return _mm512_reduce_max_epi32((__m512i)x); }

#else

struct Two { __m256i low, high; };
INLINE Two halved(const void *from) {
  return {_mm256_loadu_si256((const __m256i *)from), _mm256_loadu_si256((const __m256i *)from + 1)};
}
template <class V> INLINE V joined(__m256i low, __m256i high) {
  Two both = {low, high};
  return load<V>(&both);
}
INLINE __m256i dot(__m256i sum, __m256i code, __m256i four) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(sum, code, four);
#else  // Products are added in pairs of 16 bits, which hold twice 127 * 128: so codes are halved first.
  const __m256i ones = _mm256_set1_epi16(1), half = _mm256_and_si256(_mm256_srli_epi16(code, 1), _mm256_set1_epi8(127));
  const __m256i rest = _mm256_sub_epi8(code, half);
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(half, four), ones));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(rest, four), ones));
#endif
}
INLINE Ints dot(Ints sum, Bytes code, int32_t four) {
  const Two s = halved(&sum), c = halved(&code);
  const __m256i x = _mm256_set1_epi32(four);
  return joined<Ints>(dot(s.low, c.low, x), dot(s.high, c.high, x));
}
// The sum of N vectors' products, of codes of BITS bits. Without VNNI narrow codes are not halved: sums of 16 bits then
// hold the pairs of several vectors before they become sums of 32.
template <int BITS, int N> INLINE Ints dots(Ints sum, const Bytes *code, const char *four) {
#if defined(__AVXVNNI__)
  constexpr int HELD = 0;
#else
  constexpr int HELD = 32767 / (2 * ((1 << BITS) - 1) * 128);
#endif
  if constexpr (HELD == 0) {
    UNROLL for (int v = 0; v < N; ++v) sum = dot(sum, code[v], load<int32_t>(four + 4 * v));
    return sum;
  } else {
    const __m256i ones = _mm256_set1_epi16(1);
    Two whole = halved(&sum);
    UNROLL for (int first = 0; first < N; first += HELD) {
      Two pairs = {};
      UNROLL for (int v = first; v < N && v < first + HELD; ++v) {
        const Two c = halved(&code[v]);
        const __m256i x = _mm256_set1_epi32(load<int32_t>(four + 4 * v));
        pairs.low = _mm256_add_epi16(pairs.low, _mm256_maddubs_epi16(c.low, x));
        pairs.high = _mm256_add_epi16(pairs.high, _mm256_maddubs_epi16(c.high, x));
      }
      whole.low = _mm256_add_epi32(whole.low, _mm256_madd_epi16(pairs.low, ones));
      whole.high = _mm256_add_epi32(whole.high, _mm256_madd_epi16(pairs.high, ones));
    }
    return joined<Ints>(whole.low, whole.high);
  }
}
INLINE Bytes look_up(Bytes table, Bytes code) {
  const Two t = halved(&table), c = halved(&code);
  return joined<Bytes>(_mm256_shuffle_epi8(t.low, c.low), _mm256_shuffle_epi8(t.high, c.high));
}
INLINE Floats widen(Halves x) {
  const __m256i all = (__m256i)x;
  return joined<Floats>((__m256i)_mm256_cvtph_ps(_mm256_castsi256_si128(all)),
                        (__m256i)_mm256_cvtph_ps(_mm256_extracti128_si256(all, 1)));
}
INLINE Halves narrow(Floats x) {
  const Two both = halved(&x);
  const __m128i low = _mm256_cvtps_ph((__m256)both.low, _MM_FROUND_TO_NEAREST_INT);
  return (Halves)_mm256_set_m128i(_mm256_cvtps_ph((__m256)both.high, _MM_FROUND_TO_NEAREST_INT), low);
}
INLINE Ints widen(Levels x) {
  const __m128i all = (__m128i)x;
  return joined<Ints>(_mm256_cvtepi8_epi32(all), _mm256_cvtepi8_epi32(_mm_srli_si128(all, 8)));
}
INLINE Levels narrow(Ints x) {  // of numbers that fit
  const Two both = halved(&x);
  const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(both.low, both.high), 0xd8);
  return (Levels)_mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
}
INLINE Words upper(Halves x) {
  const __m128i low = _mm256_castsi256_si128((__m256i)x), high = _mm256_extracti128_si256((__m256i)x, 1);
  return joined<Words>(_mm256_cvtepu16_epi32(low), _mm256_cvtepu16_epi32(high)) << 16;
}
INLINE Halves upper(Words x) {
  x = x >> 16;
  const Two both = halved(&x);
  return (Halves)_mm256_permute4x64_epi64(_mm256_packus_epi32(both.low, both.high), 0xd8);
}
template <class V> INLINE auto total(V x) {
  auto sum = x[0] - x[0];
  for (int i = 0; i < LANES; ++i) sum += x[i];
  return sum;
}
INLINE int32_t most(Ints x) {
  int32_t most = x[0];
  for (int i = 1; i < LANES; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

#endif

}  // namespace
