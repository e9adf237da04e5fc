// Reduction 3. Warp shuffles: five exchanges of registers, and one barrier.
//
// Idea      Lanes exchange registers (shfl.sync.bfly), so a warp needs neither shared memory nor barriers. Its sum goes to
//           shared memory, and all warps add the warps' sums by shuffles again. A thread has OWN vectors of 16 bytes, so a
//           block has 16 KB, and there is an atomic for these.
// Bytes     4 a number.
// Limit     Memory. Which block adds first is chance, so the last bits of the result differ from run to run.
// Next      The same sum in each run.
#include "rows.cuh"

constexpr int THREADS = 256, OWN = 4;

extern "C" __global__ void __launch_bounds__(THREADS) reduction(const float *x, float *out, size_t n) {
  __shared__ Sum slots[32];
  size_t first = blockIdx.x * (size_t)(THREADS * OWN) + threadIdx.x, whole = n / 4;
  float4 own[OWN];
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    size_t at = first + i * THREADS;
    own[i] = at < whole ? reinterpret_cast<const float4 *>(x)[at] : make_float4(0, 0, 0, 0);
  }
  float sum = blockIdx.x == 0 && threadIdx.x < n % 4 ? x[whole * 4 + threadIdx.x] : 0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) sum += (own[i].x + own[i].y) + (own[i].z + own[i].w);
  Sum all = over_block(Sum{sum}, slots);
  if (threadIdx.x == 0) atomicAdd(out, all.value);
}
