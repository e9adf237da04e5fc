// 4. Register tiles: each thread makes 8 x 8 outputs.
//
// Idea      A thread reads 8 numbers of A and 8 of B and makes 64 FMAs of them: an outer product, whose sums stay in 64
//           registers. 256 threads make a tile of 128 x 128.
// FLOPs     2 M N K on the CUDA cores.
// Bytes     From L2: (M N K / 128) · 2 numbers of 2 bytes. From shared memory: 16 floats for 64 FMAs, an eighth of
//           rung 3's.
// Limit     Shared memory still: 16 lanes meet in one bank when a tile is stored, turned, and two by two when B is read.
//           Numbers come from global memory 2 bytes at a time.
// Next      Load 16 bytes at a time.
#include "numbers.cuh"

constexpr int ROWS = 128, COLUMNS = 128, DEPTH = 16, OWN = 8, THREADS = 256;

__device__ __forceinline__ void load(float (&tile)[DEPTH][ROWS], const Element *from, int first, int rows, int start,
                                     int k) {
  for (int i = threadIdx.x; i < ROWS * DEPTH; i += THREADS) {
    int row = first + i / DEPTH, at = start + i % DEPTH;
    tile[i % DEPTH][i / DEPTH] = row < rows && at < k ? to_float(from[(size_t)row * k + at]) : 0;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
gemm(const Element *a, const Element *b, Element *c, int m, int n, int k) {
  __shared__ __align__(16) float a_tile[DEPTH][ROWS];
  __shared__ __align__(16) float b_tile[DEPTH][COLUMNS];
  int first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS;
  int x = threadIdx.x % 16 * OWN, y = threadIdx.x / 16 * OWN;
  float sum[OWN][OWN] = {};
  for (int start = 0; start < k; start += DEPTH) {
    load(a_tile, a, first_row, m, start, k);
    load(b_tile, b, first_column, n, start, k);
    __syncthreads();
    for (int d = 0; d < DEPTH; ++d)
#pragma unroll
      for (int i = 0; i < OWN; ++i)
#pragma unroll
        for (int j = 0; j < OWN; ++j) sum[i][j] += a_tile[d][y + i] * b_tile[d][x + j];
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < OWN; ++i)
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      int row = first_row + y + i, column = first_column + x + j;
      if (row < m && column < n) round_to(c[(size_t)row * n + column], sum[i][j]);
    }
}
