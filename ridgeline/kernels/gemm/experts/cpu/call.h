// What panels.py hands over: the matrices of all experts in panels, and one of the two ops with them.

#pragma once

#include <cstdint>

namespace {

constexpr int WIDE = 32;  // outputs of a panel

enum Activation { SILU, GELU, GELU_TANH, SWIGLU_CLAMPED, RELU2, SILU_CLAMPED_7, SILU_CLAMPED_16 };

extern "C" struct Experts {
  const char *panel;  // [experts, panels, steps, 32 outputs, 1 input of float32 or 2 of bfloat16]
  int64_t experts, inputs, outputs, type;
};

extern "C" struct Call {
  const void *x;     // rows of inputs: of tokens for gate and up, of pairs for down
  const void *bias;  // [experts, outputs], or null
  const int32_t *start, *token;       // of `Routes`: start_E1, token_P
  const int32_t *place, *expert;      // place_TK, expert_TK
  const float *weight;                // weight_TK
  const void *add;                    // [tokens, outputs], or null
  void *y;
  int64_t tokens, used, gated, activation, threads;
  void (*parallel)(void (*)(void *), void *, unsigned, unsigned);  // OpenMP's, or null
};

}  // namespace
