// 3. Shared tiles: a block keeps a tile of both operands in shared memory.
//
// Idea      A block of 32 x 32 threads makes 32 x 32 outputs. It copies 32 x 32 numbers of A and of B, waits, and each
//           thread makes 32 FMAs from them. Each number is loaded once for 32 uses.
// FLOPs     2 M N K on the CUDA cores.
// Bytes     From L2: (M N K / 32) · 2 numbers of 2 bytes. From shared memory: 2 floats for each FMA.
// Limit     Shared memory: A's number is the same for a warp, B's 32 lie in 32 banks, so a warp needs 2 cycles for its
//           32 FMAs. B's tile is turned when it is stored, and there 32 lanes meet in one bank: see rung 6.
// Next      Let a thread make many outputs, so that a number from shared memory serves many FMAs.
#include "numbers.cuh"

constexpr int TILE = 32;

extern "C" __global__ void __launch_bounds__(TILE * TILE)
gemm(const Element *a, const Element *b, Element *c, int m, int n, int k) {
  __shared__ float a_tile[TILE][TILE];  // [row][k]
  __shared__ float b_tile[TILE][TILE];  // [k][column]
  int x = threadIdx.x, y = threadIdx.y;
  int row = blockIdx.y * TILE + y, column = blockIdx.x * TILE + x;
  int b_row = blockIdx.x * TILE + y;
  float sum = 0;
  for (int start = 0; start < k; start += TILE) {
    int i = start + x;
    a_tile[y][x] = row < m && i < k ? to_float(a[(size_t)row * k + i]) : 0;
    b_tile[x][y] = b_row < n && i < k ? to_float(b[(size_t)b_row * k + i]) : 0;
    __syncthreads();
    for (int j = 0; j < TILE; ++j) sum += a_tile[y][j] * b_tile[j][x];
    __syncthreads();
  }
  if (row < m && column < n) round_to(c[(size_t)row * n + column], sum);
}
