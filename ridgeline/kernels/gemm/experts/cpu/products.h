// Products of some rows with a panel: thirty-two outputs, one in each lane of two vectors.

#pragma once

#include <cstring>

#include "../../codes/cpu/numbers.h"
#include "call.h"

namespace {

constexpr int64_t AHEAD = 4096;  // bytes of weights, which are asked for so early: 55 GB/s, and 47 with 512 bytes

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
constexpr int ROWS = 8;  // that are multiplied together: their sums and a step's weights fill the registers
#else
constexpr int ROWS = 2;
#endif

struct Plain {  // float32
  static constexpr int64_t TYPE = FLOAT32, SIZE = 4, INPUTS = 1;  // bytes of a number; inputs of a step
  typedef float Step;
  static INLINE Floats dot(Floats sum, Floats weight, float x) { return sum + weight * x; }
};

struct Paired {  // bfloat16: a lane has two neighbouring inputs, the first in its lower half
  static constexpr int64_t TYPE = BFLOAT16, SIZE = 2, INPUTS = 2;
  typedef uint32_t Step;
  static INLINE Floats dot(Floats sum, Floats weight, uint32_t x) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weight, (__m512bh)_mm512_set1_epi32((int)x));
#else
    const uint32_t bits[2] = {x << 16, x & 0xffff0000};
    float first, second;
    memcpy(&first, bits, 4), memcpy(&second, bits + 1, 4);
    sum = sum + (Floats)((Words)weight << 16) * first;
    return sum + (Floats)((Words)weight & 0xffff0000) * second;
#endif
  }
};

// The sums of T rows times a panel. Each goes through the inputs in their order, so it is the same whatever T is.
template <class Number, int T>
INLINE void multiply(const char *panel, int64_t steps, const char *const *row, Floats (&sum)[ROWS][2]) {
  UNROLL for (int t = 0; t < T; ++t) sum[t][0] = sum[t][1] = Floats{};
  for (int64_t k = 0; k < steps; ++k, panel += 2 * BYTES) {
    __builtin_prefetch(panel + AHEAD);
    __builtin_prefetch(panel + AHEAD + BYTES);
    const Floats low = load<Floats>(panel), high = load<Floats>(panel + BYTES);
    UNROLL for (int t = 0; t < T; ++t) {
      const auto x = load<typename Number::Step>(row[t] + k * sizeof(typename Number::Step));
      sum[t][0] = Number::dot(sum[t][0], low, x);
      sum[t][1] = Number::dot(sum[t][1], high, x);
    }
  }
}

// The same for `count` rows, at most T.
template <class Number, int T>
INLINE void multiply_some(int64_t count, const char *panel, int64_t steps, const char *const *row,
                          Floats (&sum)[ROWS][2]) {
  if constexpr (T > 1)
    if (count < T) return multiply_some<Number, T - 1>(count, panel, steps, row, sum);
  multiply<Number, T>(panel, steps, row, sum);
}

// Multiply the rows of some pairs with a panel. `row_of` gives a pair's row, and `take` gets its two vectors of sums.
template <class Number, class RowOf, class Take>
INLINE void each_row(const char *panel, int64_t steps, int64_t first, int64_t end, RowOf row_of, Take take) {
  Floats sum[ROWS][2];
  const char *row[ROWS];
  for (int64_t pair = first; pair < end;) {
    const int64_t some = end - pair < ROWS ? end - pair : ROWS;
    for (int64_t t = 0; t < some; ++t) row[t] = row_of(pair + t);
    multiply_some<Number, ROWS>(some, panel, steps, row, sum);
    for (int64_t t = 0; t < some; ++t, ++pair) take(pair, sum[t][0], sum[t][1]);
  }
}

// The panel of an expert.
template <class Number> INLINE const char *panel_of(const Experts &w, int64_t expert, int64_t panels, int64_t panel) {
  return w.panel + (expert * panels + panel) * (w.inputs / Number::INPUTS) * 2 * BYTES;
}

INLINE int64_t lanes(int64_t left) { return left < 0 ? 0 : left < LANES ? left : LANES; }

}  // namespace
