// 1. Naive: one thread for each output.
//
// C[m, n] = A[m, k] · B[n, k]ᵀ, all three row-major, as the engine's linear maps are: both operands run along K.
//
// Idea      A thread walks along a row of A and a row of B.
// FLOPs     2 M N K, on the CUDA cores: a product and a sum are one FMA.
// Bytes     Each FMA loads two numbers. Threads of a warp share the row of A and have 32 rows of B, whose addresses are
//           2 K bytes apart: 32 cache lines for one load.
// Limit     The L1 cache, which looks up one line a cycle: 33 cycles for the 32 FMAs of a warp.
// Next      Let the threads of a warp read side by side.
#include "numbers.cuh"

extern "C" __global__ void __launch_bounds__(256)
gemm(const Element *a, const Element *b, Element *c, int m, int n, int k) {
  int row = blockIdx.y * blockDim.y + threadIdx.y;
  int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= m || column >= n) return;
  a += (size_t)row * k;
  b += (size_t)column * k;
  float sum = 0;
  for (int i = 0; i < k; ++i) sum += to_float(a[i]) * to_float(b[i]);
  round_to(c[(size_t)row * n + column], sum);
}
