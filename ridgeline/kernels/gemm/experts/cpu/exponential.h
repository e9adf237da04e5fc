// e to the power of sixteen numbers, and what follows from it.

#pragma once

#include "../../codes/cpu/numbers.h"

namespace {

// x = n · ln 2 + r with |r| ≤ ln 2 / 2; then e^r is Taylor's polynomial of degree 7, which is off by 2^-27 at most, and
// n is added to its exponent in two halves, since 2^128 is no number of 32 bits.
INLINE Floats exponential(Floats x) {
  const Floats zero = {}, top = zero + 89.0f, bottom = zero - 104.0f;  // beyond which the result is infinity or 0
  const Floats within = choose(x > top, top, choose(x > bottom, x, bottom));  // bottom of NaN too
  const Floats scaled = within * 1.44269504f;
  const Ints n = ints(scaled + choose(scaled > zero, zero + 0.5f, zero - 0.5f));  // towards 0, so to the nearest
  const Floats r = within - floats(n) * 0.693359375f + floats(n) * 2.12194440e-4f;
  Floats sum = r * (1.0f / 5040) + 1.0f / 720;
  sum = sum * r + 1.0f / 120;
  sum = sum * r + 1.0f / 24;
  sum = sum * r + 1.0f / 6;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  const Ints half = n >> 1, rest = n - half;
  const Floats power = sum * (Floats)((half + 127) << 23) * (Floats)((rest + 127) << 23);
  return choose(x == x, power, x);
}

INLINE Floats sigmoid(Floats x) {
  const Floats zero = {};
  return (zero + 1.0f) / (exponential(zero - x) + 1.0f);
}

}  // namespace
