// Reduction 4. Two passes: blocks write their sums, and a second launch of one block adds them.
//
// Idea      As many blocks as run at the same time walk over all numbers. Each writes one sum, and the same kernel adds these.
//           No atomics: the order is fixed, so the result is the same in each run.
// Bytes     4 a number, and 4 a block twice.
// Limit     Memory; for few numbers the second launch.
// Next      One launch.
#include "rows.cuh"

constexpr int THREADS = 256, OWN = 4;

extern "C" __global__ void __launch_bounds__(THREADS) reduction(const float *x, float *out, size_t n) {
  __shared__ Sum slots[32];
  size_t whole = n / 4, step = gridDim.x * (size_t)(THREADS * OWN);
  float sum = blockIdx.x == 0 && threadIdx.x < n % 4 ? x[whole * 4 + threadIdx.x] : 0;
  for (size_t first = blockIdx.x * (size_t)(THREADS * OWN) + threadIdx.x; first < whole; first += step) {
    float4 own[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      size_t at = first + i * THREADS;
      own[i] = at < whole ? reinterpret_cast<const float4 *>(x)[at] : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) sum += (own[i].x + own[i].y) + (own[i].z + own[i].w);
  }
  Sum all = over_block(Sum{sum}, slots);
  if (threadIdx.x == 0) out[blockIdx.x] = all.value;
}
