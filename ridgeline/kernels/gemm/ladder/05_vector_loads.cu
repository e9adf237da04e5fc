// 5. Vector loads: 16 bytes at a time.
//
// Idea      One instruction moves 16 bytes: 8 numbers from global memory, 4 floats from shared memory, 8 outputs to
//           global memory. So rows must begin at multiples of 16 bytes: N and K are multiples of 8 from here on.
// FLOPs     2 M N K on the CUDA cores.
// Bytes     As rung 4, in an eighth of the instructions from global and a quarter of those from shared memory.
// Limit     Shared memory's banks. A thread's 8 numbers of B are 32 bytes, so lanes that read 16 of them meet two by two;
//           and two lanes meet when a tile is stored, turned, number by number (in rung 4 it was 16).
// Next      A layout in which lanes never meet.
#include "ptx.cuh"

constexpr int ROWS = 128, COLUMNS = 128, DEPTH = 16, OWN = 8, THREADS = 256;

__device__ __forceinline__ void load(float (&tile)[DEPTH][ROWS], const Element *from, int first, int rows, int start,
                                     int k) {
  int row = threadIdx.x / 2, at = threadIdx.x % 2 * 8;
  Vector vector = {};
  if (first + row < rows && start + at < k)
    vector = *reinterpret_cast<const Vector *>(from + (size_t)(first + row) * k + start + at);
#pragma unroll
  for (int i = 0; i < 8; ++i) store_shared(&tile[at + i][row], to_float(vector.at[i]));
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
    for (int d = 0; d < DEPTH; ++d) {
      float4 a4[2] = {load_shared(&a_tile[d][y]), load_shared(&a_tile[d][y + 4])};
      float4 b4[2] = {load_shared(&b_tile[d][x]), load_shared(&b_tile[d][x + 4])};
      const float *a8 = &a4[0].x, *b8 = &b4[0].x;
#pragma unroll
      for (int i = 0; i < OWN; ++i)
#pragma unroll
        for (int j = 0; j < OWN; ++j) sum[i][j] += a8[i] * b8[j];
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    int row = first_row + y + i, column = first_column + x;
    Vector vector;
#pragma unroll
    for (int j = 0; j < OWN; ++j) round_to(vector.at[j], sum[i][j]);
    if (row < m && column < n) *reinterpret_cast<Vector *>(c + (size_t)row * n + column) = vector;
  }
}
