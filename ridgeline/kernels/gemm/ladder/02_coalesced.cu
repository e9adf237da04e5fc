// 2. Coalesced: one warp for each output.
//
// Idea      Both operands run along K, so the lanes of a warp stand side by side along K: lane i takes elements i,
//           i + 32, ... One load of the warp is 64 bytes of one cache line. At the end the lanes add up their sums in
//           five steps of a butterfly.
// FLOPs     2 M N K on the CUDA cores, and 5 sums of a warp for each output.
// Bytes     Each FMA still loads two numbers, but 32 of them are one line.
// Limit     The L1 cache and L2 alike: 2 lines for the 32 FMAs of a warp; and since a block's 8 warps share a row of A
//           and nothing else, 2.25 bytes come from L2 for each FMA.
// Next      Keep a tile of both operands in shared memory, and use each number many times.
#include "numbers.cuh"

extern "C" __global__ void __launch_bounds__(256)
gemm(const Element *a, const Element *b, Element *c, int m, int n, int k) {
  int row = blockIdx.y;
  int column = blockIdx.x * blockDim.y + threadIdx.y;  // threadIdx.x is the lane
  if (column >= n) return;  // the whole warp
  a += (size_t)row * k;
  b += (size_t)column * k;
  float sum = 0;
  for (int i = threadIdx.x; i < k; i += 32) sum += to_float(a[i]) * to_float(b[i]);
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
  if (threadIdx.x == 0) round_to(c[(size_t)row * n + column], sum);
}
