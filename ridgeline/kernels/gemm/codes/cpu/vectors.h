// Vectors of 64 bytes: sixteen outputs' numbers of 32 bits, or four codes of each.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

namespace {

constexpr int LANES = 16, BYTES = 64;  // of a vector

typedef int8_t Levels __attribute__((vector_size(16)));
typedef uint16_t Halves __attribute__((vector_size(32)));

template <class V> INLINE V load(const void *from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}

template <class V> INLINE void store(void *to, V v) { memcpy(to, &v, sizeof v); }

}  // namespace

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include "avx512.h"
#else
#include "avx2.h"
#endif
