// Codes and scales of a panel, as they lie in memory, and the sums that become outputs.

#pragma once

#include <type_traits>

#include "call.h"
#include "numbers.h"

namespace {

template <int WIDTH> INLINE Bytes plane(const uint8_t *code, int v) {
  const Pairs bits = load<Pairs>(code + BYTES * (v % WIDTH)) >> (WIDTH * (v / WIDTH));
  return (Bytes)bits & (uint8_t)((1 << WIDTH) - 1);
}

template <int BITS> INLINE Bytes codes(const uint8_t *code, int v) {
  constexpr int LOW = BITS >= 8 ? 8 : BITS >= 4 ? 4 : 2, HIGH = BITS - LOW;
  const Bytes low = plane<LOW>(code, v);
  if constexpr (HIGH == 0) return low;
  else return low | (Bytes)((Pairs)plane<HIGH>(code + BYTES * LOW, v) << LOW);
}

// The scales or minima of a group.
INLINE Floats scales(const void *values, const uint16_t *outer, int64_t group, int64_t super) {
  if (!outer) return widen(load<Halves>((const uint16_t *)values + group * LANES));
  const Levels level = load<Levels>((const int8_t *)values + group * LANES);
  return floats(widen(level)) * widen(load<Halves>(outer + super * LANES));
}

// Write sixteen outputs of a token: sums of x times scales, or of whole numbers where a token has one step.
INLINE void write_sums(const Weight &w, const Call &c, const Rounded &, Floats sum, int64_t token, int64_t panel) {
  const int64_t at = panel * LANES, count = w.outputs - at < LANES ? w.outputs - at : LANES;
  if (count <= 0) return;
  Floats y = sum * load<Floats>(w.factor + at);
  if (c.bias) y += read(c.bias, c.type, at, count);
  write(c.y, c.type, token * w.outputs + at, y, count);
}
INLINE void write_sums(const Weight &w, const Call &c, const Rounded &x, Ints sum, int64_t token, int64_t panel) {
  write_sums(w, c, x, floats(sum) * x.step[token], token, panel);
}

// Call `body` with the bits of a code as a constant.
template <class Body> INLINE void with_bits(int64_t bits, Body body) {
  switch (bits) {
    case 2: return body(std::integral_constant<int, 2>());
    case 3: return body(std::integral_constant<int, 3>());
    case 4: return body(std::integral_constant<int, 4>());
    case 5: return body(std::integral_constant<int, 5>());
    case 6: return body(std::integral_constant<int, 6>());
    default: return body(std::integral_constant<int, 8>());
  }
}

}  // namespace
