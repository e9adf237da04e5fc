// What panels.py hands over: a weight in panels, and one product with it. Its structures have the same fields.

#pragma once

#include <cstdint>

namespace {

constexpr int RUN = 32, VECTORS = 8;  // inputs of a run, and its vectors
constexpr int SUPER = 8;  // runs that share an outer scale

enum Type { FLOAT32, BFLOAT16, FLOAT16 };

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
struct Rounded {
  char *level;     // [tokens, runs, 32], or in tiles: [tokens / 16, steps, 16, 64 bytes], of int8 or of bfloat16
  float *step;     // [tokens, runs], or [tokens] where a token has one step
  float *sum;      // [tokens, runs, 2], of x
  int32_t *start;  // [tokens, runs, 2] or [tokens]: what sums of products begin with, to take `middle` from codes
  int64_t width;   // bytes of a token's levels
  bool tiles;

  char *at(int64_t token, int64_t byte) const {
    if (!tiles) return level + token * width + byte;
    return level + (token / 16 * width + byte / 64 * 64) * 16 + token % 16 * 64 + byte % 64;
  }
};

}  // namespace
