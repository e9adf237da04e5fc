// 6. Conflict-free: a layout of shared memory in which lanes never meet in a bank.
//
// Idea      Shared memory has 32 banks of 4 bytes. Two changes to rung 5:
//           * Stores: lanes 2 i and 2 i + 1 hold numbers k and k + 8 of row i, which meet since a line of the tile is a
//             multiple of 32 banks. Lines from k = 8 on have their columns exchanged in pairs of 16 (column ^ 16):
//             an XOR swizzle, the trick that TMA does in hardware from rung 10 on.
//           * Loads: a thread's 8 columns are two groups of 4, 64 columns apart, so that neighbours read neighbours.
// FLOPs     2 M N K on the CUDA cores.
// Bytes     As rung 5: each access now takes the fewest cycles that its bytes need.
// Limit     Shared memory and the FMA units alike (4 reads of 4 cycles for 64 FMAs at 4 a cycle), and latency: a block
//           loads, waits, computes, waits.
// Next      Load the next tile while this one is computed.
#include "ptx.cuh"

constexpr int ROWS = 128, COLUMNS = 128, DEPTH = 16, OWN = 8, THREADS = 256;

__device__ __forceinline__ int swizzled(int depth, int column) { return column ^ (depth / 8 * 16); }

__device__ __forceinline__ void load(float (&tile)[DEPTH][ROWS], const Element *from, int first, int rows, int start,
                                     int k) {
  int row = threadIdx.x / 2, at = threadIdx.x % 2 * 8;
  Vector vector = {};
  if (first + row < rows && start + at < k)
    vector = *reinterpret_cast<const Vector *>(from + (size_t)(first + row) * k + start + at);
#pragma unroll
  for (int i = 0; i < 8; ++i) store_shared(&tile[at + i][swizzled(at + i, row)], to_float(vector.at[i]));
}

extern "C" __global__ void __launch_bounds__(THREADS)
gemm(const Element *a, const Element *b, Element *c, int m, int n, int k) {
  __shared__ __align__(16) float a_tile[DEPTH][ROWS];
  __shared__ __align__(16) float b_tile[DEPTH][COLUMNS];
  int first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS;
  int x = threadIdx.x % 16 * 4, y = threadIdx.x / 16 * 4;
  float sum[OWN][OWN] = {};
  for (int start = 0; start < k; start += DEPTH) {
    load(a_tile, a, first_row, m, start, k);
    load(b_tile, b, first_column, n, start, k);
    __syncthreads();
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      float4 a4[2] = {load_shared(&a_tile[d][swizzled(d, y)]), load_shared(&a_tile[d][swizzled(d, y + 64)])};
      float4 b4[2] = {load_shared(&b_tile[d][swizzled(d, x)]), load_shared(&b_tile[d][swizzled(d, x + 64)])};
      const float *a8 = &a4[0].x, *b8 = &b4[0].x;
#pragma unroll
      for (int i = 0; i < OWN; ++i)
#pragma unroll
        for (int j = 0; j < OWN; ++j) sum[i][j] += a8[i] * b8[j];
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < OWN; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = first_row + y + i % 4 + i / 4 * 64, column = first_column + x + half * 64;
      Half vector;
#pragma unroll
      for (int j = 0; j < 4; ++j) round_to(vector.at[j], sum[i][half * 4 + j]);
      if (row < m && column < n) *reinterpret_cast<Half *>(c + (size_t)row * n + column) = vector;
    }
}
