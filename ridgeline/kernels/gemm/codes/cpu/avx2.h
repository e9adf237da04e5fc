// Vectors of 64 bytes as two of 32, for CPUs with AVX2. GCC would move one vector of 64 bytes through memory there.

#pragma once

namespace {

template <class T> struct Two {
  typedef T Half __attribute__((vector_size(32)));
  typedef T Quarter __attribute__((vector_size(16)));
  Half low, high;

  template <class U> explicit INLINE operator Two<U>() const {
    return {(typename Two<U>::Half)low, (typename Two<U>::Half)high};
  }
#define OPERATOR(op)                                                                              \
  friend INLINE Two operator op(Two a, Two b) { return {a.low op b.low, a.high op b.high}; }      \
  friend INLINE Two operator op(Two a, T b) { return {a.low op b, a.high op b}; }
  OPERATOR(+) OPERATOR(-) OPERATOR(*) OPERATOR(/) OPERATOR(&) OPERATOR(|) OPERATOR(<<) OPERATOR(>>)
#undef OPERATOR
#define COMPARISON(op) \
  friend INLINE Two<int32_t> operator op(Two a, Two b) { return {a.low op b.low, a.high op b.high}; }
  COMPARISON(>) COMPARISON(==)
#undef COMPARISON
  INLINE Two &operator+=(Two other) { return *this = *this + other; }
  INLINE Two &operator-=(Two other) { return *this = *this - other; }
};

typedef Two<uint8_t> Bytes;
typedef Two<uint16_t> Pairs;
typedef Two<int32_t> Ints;
typedef Two<uint32_t> Words;
typedef Two<float> Floats;

template <class V> INLINE V joined(__m256i low, __m256i high) {
  return {(typename V::Half)low, (typename V::Half)high};
}
#define LOAD_AND_STORE(V)                                                             \
  template <> INLINE V load<V>(const void *from) {                                    \
    return {load<V::Half>(from), load<V::Half>((const char *)from + sizeof(V::Half))}; \
  }                                                                                   \
  INLINE void store(void *to, V v) {                                                  \
    store(to, v.low);                                                                 \
    store((char *)to + sizeof(V::Half), v.high);                                      \
  }
LOAD_AND_STORE(Bytes) LOAD_AND_STORE(Pairs) LOAD_AND_STORE(Floats)
#undef LOAD_AND_STORE

INLINE Ints all(int32_t x) { return Ints{} + x; }
INLINE Floats floats(Ints x) {
  return {__builtin_convertvector(x.low, Floats::Half), __builtin_convertvector(x.high, Floats::Half)};
}
INLINE Ints ints(Floats x) {
  return {__builtin_convertvector(x.low, Ints::Half), __builtin_convertvector(x.high, Ints::Half)};
}
template <class V> INLINE V choose(Ints which, V one, V other) {
  return {which.low ? one.low : other.low, which.high ? one.high : other.high};
}

// The sum of N vectors' products, of codes of BITS bits and four inputs for each vector.
template <int BITS, int N> INLINE Ints dots(Ints sum, const Bytes *code, const char *four) {
  __m256i low = (__m256i)sum.low, high = (__m256i)sum.high;
#if defined(__AVXVNNI__)
  UNROLL for (int v = 0; v < N; ++v) {
    const __m256i x = _mm256_set1_epi32(load<int32_t>(four + 4 * v));
    low = _mm256_dpbusd_avx_epi32(low, (__m256i)code[v].low, x);
    high = _mm256_dpbusd_avx_epi32(high, (__m256i)code[v].high, x);
  }
#else
  if constexpr (BITS == 8) {  // too wide for what follows: the lower and the upper four bits
    Bytes even[N], odd[N];
    UNROLL for (int v = 0; v < N; ++v) even[v] = code[v] & 15, odd[v] = (Bytes)((Pairs)code[v] >> 4) & 15;
    return dots<4, N>(sum, even, four) + (dots<4, N>(Ints{}, odd, four) << 4);
  }
  // Sums of 16 bits hold the pairs of HELD vectors before they become sums of 32.
  constexpr int HELD = 32767 / (2 * ((1 << BITS) - 1) * 128);
  const __m256i ones = _mm256_set1_epi16(1);
  UNROLL for (int first = 0; first < N; first += HELD) {
    __m256i low_pairs = {}, high_pairs = {};
    UNROLL for (int v = first; v < N && v < first + HELD; ++v) {
      const __m256i x = _mm256_set1_epi32(load<int32_t>(four + 4 * v));
      low_pairs = _mm256_add_epi16(low_pairs, _mm256_maddubs_epi16((__m256i)code[v].low, x));
      high_pairs = _mm256_add_epi16(high_pairs, _mm256_maddubs_epi16((__m256i)code[v].high, x));
    }
    low = _mm256_add_epi32(low, _mm256_madd_epi16(low_pairs, ones));
    high = _mm256_add_epi32(high, _mm256_madd_epi16(high_pairs, ones));
  }
#endif
  return joined<Ints>(low, high);
}

INLINE Bytes look_up(Bytes table, Bytes code) {
  return joined<Bytes>(_mm256_shuffle_epi8((__m256i)table.low, (__m256i)code.low),
                       _mm256_shuffle_epi8((__m256i)table.high, (__m256i)code.high));
}
INLINE __m128i lower(__m256i x) { return _mm256_castsi256_si128(x); }
INLINE __m128i upper(__m256i x) { return _mm256_extracti128_si256(x, 1); }
INLINE Floats widen(Halves x) {
  return joined<Floats>((__m256i)_mm256_cvtph_ps(lower((__m256i)x)), (__m256i)_mm256_cvtph_ps(upper((__m256i)x)));
}
INLINE Halves narrow(Floats x) {
  const __m128i low = _mm256_cvtps_ph((__m256)x.low, _MM_FROUND_TO_NEAREST_INT);
  return (Halves)_mm256_set_m128i(_mm256_cvtps_ph((__m256)x.high, _MM_FROUND_TO_NEAREST_INT), low);
}
INLINE Ints widen(Levels x) {
  return joined<Ints>(_mm256_cvtepi8_epi32((__m128i)x), _mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)x, 8)));
}
INLINE Levels narrow(Ints x) {  // of numbers that fit
  const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)x.low, (__m256i)x.high), 0xd8);
  return (Levels)_mm_packs_epi16(lower(pairs), upper(pairs));
}
INLINE Words upper(Halves x) {
  return joined<Words>(_mm256_cvtepu16_epi32(lower((__m256i)x)), _mm256_cvtepu16_epi32(upper((__m256i)x))) << 16;
}
INLINE Halves upper(Words x) {
  const Words moved = x >> 16;
  return (Halves)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)moved.low, (__m256i)moved.high), 0xd8);
}

// What `both` makes of all lanes of x: halves are put together until one lane is left.
template <class T, class Both> INLINE T folded(Two<T> x, Both both) {
  typedef typename Two<T>::Half Half;
  typedef typename Two<T>::Quarter Quarter;
  const Half eight = both(x.low, x.high);
  Quarter four = both((Quarter)lower((__m256i)eight), (Quarter)upper((__m256i)eight));
  four = both(four, (Quarter)_mm_shuffle_epi32((__m128i)four, 0x4e));
  four = both(four, (Quarter)_mm_shuffle_epi32((__m128i)four, 0xb1));
  return four[0];
}
template <class T> INLINE T total(Two<T> x) {
  return folded(x, [](auto a, auto b) { return a + b; });
}
INLINE int32_t most(Ints x) {
  return folded(x, [](auto a, auto b) { return a > b ? a : b; });
}

}  // namespace
