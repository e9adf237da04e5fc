// Transpose 4. Swizzled: no conflicts, and no padding.
//
// Idea      Number x of row y lies at place x ^ y of its row. A row is still a permutation of 32 banks, and a column is one too,
//           so both are read and written in one wavefront. Padding to 33 (rung 3) does the same for 128 bytes a tile more, and
//           spoils the alignment that loads of 16 bytes and TMA need.
// Bytes     8 a number.
// Limit     Bytes on their way: a thread has four loads of 4 bytes.
// Next      Vectors.
#include "rows.cuh"

constexpr int TILE = 32, STEP = 8;

extern "C" __global__ void __launch_bounds__(TILE *STEP)
transpose(const float *in, float *out, int rows, int columns) {
  __shared__ float tile[TILE][TILE];
  int left = blockIdx.x * TILE, top = blockIdx.y * TILE;
#pragma unroll
  for (int j = threadIdx.y; j < TILE; j += STEP) {
    bool inside = top + j < rows && left + threadIdx.x < columns;
    store_shared(&tile[j][threadIdx.x ^ j], inside ? in[(size_t)(top + j) * columns + left + threadIdx.x] : 0.f);
  }
  __syncthreads();
#pragma unroll
  for (int j = threadIdx.y; j < TILE; j += STEP) {
    float number = load_word(&tile[threadIdx.x][j ^ threadIdx.x]);
    if (left + j < columns && top + threadIdx.x < rows) out[(size_t)(left + j) * rows + top + threadIdx.x] = number;
  }
}
