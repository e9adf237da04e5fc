// What panels.py hands over: a weight in panels, and one product with it. Its structures have the same fields.

#pragma once

#include <cstdint>

namespace {

constexpr int RUN = 32, VECTORS = 8;  // inputs of a run, and its vectors
constexpr int SUPER = 8;  // runs that share an outer scale
constexpr int SIDE = 8;   // tokens that are multiplied together at most

extern "C" struct Weight {
  const uint8_t *code;         // [panels, runs, vectors of the planes, 64]
  const void *scale, *minimum; // [panels, groups, 16]: float16, or int8 beneath outer scales; no minimum: null
  const uint16_t *outer, *outer_minimum;  // float16 [panels, supers, 16], or null
  const float *factor;         // [panels * 16], of the outputs
  const uint8_t *table;        // the level of each code, or null
  int64_t inputs, outputs, runs, bits, group, middle;
  int64_t by_token;            // 1: activations have a step for each token, otherwise for each run
};

extern "C" struct Call {
  const void *x, *residual, *norm, *bias;
  void *sum, *y;
  int64_t tokens, type, norm_type, threads;
  int64_t tiles;  // 1: the process may use tiles
  double eps;
  void (*parallel)(void (*)(void *), void *, unsigned, unsigned);  // OpenMP's, or null
};

// Activations after rounding: x = level * step. A run has one sum, or two where groups have 16 inputs.
//
// Some tokens' runs lie side by side, so that those which are multiplied together are a fixed distance apart.
struct Rounded {
  char *level;     // [tokens / side, runs, side, 32], or in tiles: [tokens / 16, steps, 16, 64 bytes], int8 or bfloat16
  float *step;     // [tokens / side, runs, side], or [tokens] where a token has one step
  float *sum;      // [tokens / side, runs, side, 2], of x
  int32_t *start;  // likewise, or [tokens]: what sums of products begin with, so that `middle` is taken from codes
  int64_t runs, side, width;  // width: bytes of a token's levels
  bool tiles;

  int64_t run(int64_t token, int64_t k) const { return (token / side * runs + k) * side + token % side; }

  char *at(int64_t token, int64_t byte) const {
    if (!tiles) return level + run(token, byte / RUN) * RUN + byte % RUN;
    return level + (token / 16 * width + byte / 64 * 64) * 16 + token % 16 * 64 + byte % 64;
  }
};

}  // namespace
