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
  float *row_largest;                       // [M]: written, and zeros before
};

struct Place {  // of the two numbers; always within the output
  int row, column, n;
};

struct Step {
  static constexpr int outputs = 2;
  static constexpr bool reduces = false;
};

struct Scale : Step {
  static __device__ void apply(float (&x)[2], const Extras &extras, Place p) {
    float row = extras.row_scales[p.row];
    x[0] *= row * extras.column_scales[p.column];
    x[1] *= row * extras.column_scales[p.column + 1];
  }
};
struct Bias : Step {
  static __device__ void apply(float (&x)[2], const Extras &extras, Place p) {
    x[0] += to_float(extras.bias[p.column]);
    x[1] += to_float(extras.bias[p.column + 1]);
  }
};
struct Residual : Step {
  static __device__ void apply(float (&x)[2], const Extras &extras, Place p) {
    const bf16 *at = extras.residual + (size_t)p.row * p.n + p.column;
    x[0] += to_float(at[0]);
    x[1] += to_float(at[1]);
  }
};
struct Relu : Step {
  static __device__ void apply(float (&x)[2], const Extras &, Place) {
    x[0] = fmaxf(x[0], 0.f);
    x[1] = fmaxf(x[1], 0.f);
  }
};
struct Gelu : Step {
  static __device__ float of(float x) { return 0.5f * x * (1.f + erff(x * 0.70710678f)); }
  static __device__ void apply(float (&x)[2], const Extras &, Place) {
    x[0] = of(x[0]);
    x[1] = of(x[1]);
  }
};
// The last step, for gates and values in turn: B's rows 2 j and 2 j + 1 make output j, and C is [M, N / 2].
struct SwiGlu : Step {
  static constexpr int outputs = 1;
  static __device__ void apply(float (&x)[2], const Extras &, Place) {
    x[0] *= inverse(1.f + power_of_2(-1.44269504f * x[0])) * x[1];
  }
};
// The last step: the largest size of each row, which quantizing it takes. Which block comes first does not matter to it.
struct RowMax : Step {
  static constexpr bool reduces = true;
  static __device__ void apply(float (&)[2], const Extras &, Place) {}
};

template <class... Steps> struct Chain : Step {
  static __device__ void apply(float (&)[2], const Extras &, Place) {}
};
template <class First, class... Rest> struct Chain<First, Rest...> {
  static constexpr int outputs = First::outputs == 1 ? 1 : Chain<Rest...>::outputs;
  static constexpr bool reduces = First::reduces || Chain<Rest...>::reduces;
  static __device__ void apply(float (&x)[2], const Extras &extras, Place p) {
    First::apply(x, extras, p);
    Chain<Rest...>::apply(x, extras, p);
  }
};
typedef Chain<EPILOGUE> Epilogue;

// What two neighbours of a row become.
struct alignas(Epilogue::outputs * sizeof(Output)) Finished {
  Output at[Epilogue::outputs];
};

// Finish two neighbours of a row, which need not be within the output. `largest` is that of the row until here.
__device__ __forceinline__ Finished finish(float x, float y, const Extras &extras, int row, int column, int m, int n,
                                           float &largest) {
  float values[2] = {x, y};
  Epilogue::apply(values, extras, Place{min(row, m - 1), min(column, n - 2), n});  // no branch: wgmma.cuh says why
  Finished rounded;
  for (int i = 0; i < Epilogue::outputs; ++i) {
    if (Epilogue::reduces && row < m && column < n) largest = fmaxf(largest, fabsf(values[i]));
    round_to(rounded.at[i], values[i]);
  }
  return rounded;
}

// Give the largest size that four neighbours have met in a row to all blocks.
__device__ __forceinline__ void reduce(const Extras &extras, float largest, int row, int m) {
  if constexpr (Epilogue::reduces) {
    for (int mask = 1; mask < 4; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
    largest_if(threadIdx.x % 4 == 0 && row < m, extras.row_largest + min(row, m - 1), largest);
  }
}
