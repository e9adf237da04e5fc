// 7. cp.async: the next tile travels while this one is computed.
//
// Idea      cp.async copies 16 bytes from global to shared memory without registers, and the thread goes on. Two
//           buffers: while one is computed, the other is filled. The copies change nothing, so tiles stay in 16 bits and
//           run along K as in memory; a thread reads 8 steps of K at once and widens them itself.
// FLOPs     2 M N K on the CUDA cores, and one shift for each 16-bit number that is widened: 128 for 512 FMAs.
// Bytes     From L2: (M N K / 128) · 2 numbers of 2 bytes. From shared memory: 16 times 16 bytes for 512 FMAs. Lines are
//           80 bytes apart, an odd number of 16s, so that 8 neighbours read from different banks.
// Limit     Instructions: a multiprocessor issues four a cycle, and its FMA units alone would take them all. Their rate
//           is a fifteenth of the tensor cores'.
// Next      The tensor cores.
#include "ptx.cuh"

constexpr int ROWS = 128, COLUMNS = 128, DEPTH = 32, PITCH = DEPTH + 8, OWN = 8, THREADS = 256;

__device__ __forceinline__ void load(Element (&tile)[ROWS][PITCH], const Element *from, int first, int rows, int start,
                                     int k) {
#pragma unroll
  for (int i = threadIdx.x; i < ROWS * DEPTH / 8; i += THREADS) {
    int row = i / (DEPTH / 8), at = i % (DEPTH / 8) * 8;
    bool inside = first + row < rows && start + at < k;
    cp_async_16(&tile[row][at], inside ? from + (size_t)(first + row) * k + start + at : from, inside);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
gemm(const Element *a, const Element *b, Element *c, int m, int n, int k) {
  __shared__ __align__(16) Element a_tile[2][ROWS][PITCH];
  __shared__ __align__(16) Element b_tile[2][COLUMNS][PITCH];
  int first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS;
  int x = threadIdx.x % 16, y = threadIdx.x / 16;
  float sum[OWN][OWN] = {};
  load(a_tile[0], a, first_row, m, 0, k);
  load(b_tile[0], b, first_column, n, 0, k);
  cp_async_commit();
  for (int start = 0, now = 0; start < k; start += DEPTH, now ^= 1) {
    if (start + DEPTH < k) {
      load(a_tile[now ^ 1], a, first_row, m, start + DEPTH, k);
      load(b_tile[now ^ 1], b, first_column, n, start + DEPTH, k);
    }
    cp_async_commit();  // maybe an empty group, so that one group is always the next tile's
    cp_async_wait<1>();
    __syncthreads();
#pragma unroll
    for (int d = 0; d < DEPTH; d += 8) {
      Vector b8[OWN];
#pragma unroll
      for (int j = 0; j < OWN; ++j) b8[j] = *reinterpret_cast<Vector *>(&b_tile[now][x + 16 * j][d]);
#pragma unroll
      for (int i = 0; i < OWN; ++i) {
        Vector a8 = *reinterpret_cast<Vector *>(&a_tile[now][y + 16 * i][d]);
#pragma unroll
        for (int e = 0; e < 8; ++e)
#pragma unroll
          for (int j = 0; j < OWN; ++j) sum[i][j] += to_float(a8.at[e]) * to_float(b8[j].at[e]);
      }
    }
    __syncthreads();
  }
  cp_async_wait<0>();
#pragma unroll
  for (int i = 0; i < OWN; ++i)
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      int row = first_row + y + 16 * i, column = first_column + x + 16 * j;
      if (row < m && column < n) round_to(c[(size_t)row * n + column], sum[i][j]);
    }
}
