// Numbers of 16 and 32 bits, read and written sixteen at a time.

#pragma once

#include "vectors.h"

namespace {

enum Type { FLOAT32, BFLOAT16, FLOAT16 };

INLINE Floats from_bfloat16(Halves x) { return (Floats)upper(x); }

INLINE Halves to_bfloat16(Floats x) {
#if defined(__AVX512BF16__)
  return (Halves)_mm512_cvtneps_pbh((__m512)x);
#endif
  const Words bits = (Words)x, rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const Words kept = choose(x == x, rounded, bits | 0x400000);  // NaN stays NaN
  return upper(kept);
}

// Sixteen numbers from place `at` on, of which `count` are there; the others are 0.
INLINE Floats read(const void *x, int64_t type, int64_t at, int64_t count = LANES) {
  const int64_t size = type == FLOAT32 ? 4 : 2;
  const char *from = (const char *)x + at * size;
  char piece[BYTES] = {};
  if (count < LANES) from = (const char *)memcpy(piece, from, count * size);
  if (type == FLOAT32) return load<Floats>(from);
  return type == BFLOAT16 ? from_bfloat16(load<Halves>(from)) : widen(load<Halves>(from));
}

INLINE void write(void *y, int64_t type, int64_t at, Floats value, int64_t count = LANES) {
  if (type == FLOAT32) {
    char piece[BYTES];
    if (count < LANES) store(piece, value), memcpy((char *)y + at * 4, piece, count * 4);
    else store((char *)y + at * 4, value);
    return;
  }
  const Halves half = type == BFLOAT16 ? to_bfloat16(value) : narrow(value);
  if (count < LANES) memcpy((char *)y + at * 2, &half, count * 2);
  else store((char *)y + at * 2, half);
}

INLINE float largest(Ints magnitude) {  // of bits of floats without their sign, where NaN is above infinity
  const int32_t bits = most(magnitude);
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

INLINE Ints magnitudes(Floats x) { return (Ints)x & 0x7fffffff; }

}  // namespace
