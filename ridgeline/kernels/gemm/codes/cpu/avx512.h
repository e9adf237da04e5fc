// Vectors of 64 bytes in one register, for CPUs with AVX-512.

#pragma once

namespace {

typedef uint8_t Bytes __attribute__((vector_size(64)));
typedef uint16_t Pairs __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));

INLINE Ints all(int32_t x) { return x - Ints{}; }
INLINE Floats floats(Ints x) { return __builtin_convertvector(x, Floats); }
INLINE Ints ints(Floats x) { return __builtin_convertvector(x, Ints); }
template <class V> INLINE V choose(Ints which, V one, V other) { return which ? one : other; }

// The sum of N vectors' products, of codes of BITS bits and four inputs for each vector.
template <int BITS, int N> INLINE Ints dots(Ints sum, const Bytes *code, const char *four) {
  UNROLL for (int v = 0; v < N; ++v)
    sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)code[v], _mm512_set1_epi32(load<int32_t>(four + 4 * v)));
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

}  // namespace
