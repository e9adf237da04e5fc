// What happens to sums on their way out, in registers: steps that compose. -DEPILOGUE="Scale, Bias, Gelu" is the chain,
// from left to right; without it sums are rounded and stored. A step gets two neighbours of a row at a time.
#pragma once
#include "wgmma.cuh"

#ifndef EPILOGUE
#define EPILOGUE
#endif

// Pointers that the chain has no step for may be null.
struct Extras {
  const float *row_scales, *column_scales;  // [M], [N]: of A's rows and B's rows, where these are quantized
  const bf16 *bias, *residual;              // [N], [M, N]
};

struct Place {  // of the two numbers; always within the output
  int row, column, n;
};

struct Scale {
  static constexpr int outputs = 2;
  static __device__ void apply(float (&x)[2], const Extras &extras, Place p) {
    float row = extras.row_scales[p.row];
    x[0] *= row * extras.column_scales[p.column];
    x[1] *= row * extras.column_scales[p.column + 1];
  }
};
struct Bias {
  static constexpr int outputs = 2;
  static __device__ void apply(float (&x)[2], const Extras &extras, Place p) {
    x[0] += to_float(extras.bias[p.column]);
    x[1] += to_float(extras.bias[p.column + 1]);
  }
};
struct Residual {
  static constexpr int outputs = 2;
  static __device__ void apply(float (&x)[2], const Extras &extras, Place p) {
    const bf16 *at = extras.residual + (size_t)p.row * p.n + p.column;
    x[0] += to_float(at[0]);
    x[1] += to_float(at[1]);
  }
};
struct Relu {
  static constexpr int outputs = 2;
  static __device__ void apply(float (&x)[2], const Extras &, Place) {
    x[0] = fmaxf(x[0], 0.f);
    x[1] = fmaxf(x[1], 0.f);
  }
};
struct Gelu {
  static constexpr int outputs = 2;
  static __device__ float of(float x) { return 0.5f * x * (1.f + erff(x * 0.70710678f)); }
  static __device__ void apply(float (&x)[2], const Extras &, Place) {
    x[0] = of(x[0]);
    x[1] = of(x[1]);
  }
};
// The last step, for gates and values in turn: B's rows 2 j and 2 j + 1 make output j, and C is [M, N / 2].
struct SwiGlu {
  static constexpr int outputs = 1;
  static __device__ void apply(float (&x)[2], const Extras &, Place) { x[0] = x[0] / (1.f + expf(-x[0])) * x[1]; }
};

template <class... Steps> struct Chain {
  static constexpr int outputs = 2;
  static __device__ void apply(float (&)[2], const Extras &, Place) {}
};
template <class First, class... Rest> struct Chain<First, Rest...> {
  static constexpr int outputs = First::outputs == 1 ? 1 : Chain<Rest...>::outputs;
  static __device__ void apply(float (&x)[2], const Extras &extras, Place p) {
    First::apply(x, extras, p);
    Chain<Rest...>::apply(x, extras, p);
  }
};
typedef Chain<EPILOGUE> Epilogue;

// Finish two neighbours of a row, and store what lies within the output.
__device__ __forceinline__ void finish(Output *c, float x, float y, const Extras &extras, int row, int column, int m,
                                       int n) {
  bool inside = row < m && column < n;
  float values[2] = {x, y};
  Epilogue::apply(values, extras, Place{min(row, m - 1), min(column, n - 2), n});  // no branch: wgmma.cuh says why
  struct alignas(Epilogue::outputs * sizeof(Output)) {
    Output at[Epilogue::outputs];
  } rounded;
  for (int i = 0; i < Epilogue::outputs; ++i) round_to(rounded.at[i], values[i]);
  size_t width = n / 2 * Epilogue::outputs;
  store_if(inside, c + row * width + column / 2 * Epilogue::outputs, rounded);
}
