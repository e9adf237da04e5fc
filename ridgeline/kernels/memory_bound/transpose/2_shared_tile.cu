// Transpose 2. A tile in shared memory: lines are read and lines are written.
//
// Idea      A block reads a tile of 32 x 32 by rows and keeps it. Then it reads columns of the tile and writes them as rows:
//           both sides of global memory are lines of 128 bytes.
// Bytes     8 a number, of memory and of L2.
// Limit     Banks. Shared memory has 32 of 4 bytes, and the numbers of a column are 32 apart: all 32 lanes want the same bank,
//           so a load takes 32 wavefronts in place of one.
// Next      A layout in which columns are spread over banks.
#include "rows.cuh"

#ifndef PITCH
#define PITCH 32  // 33: rung 3
#endif
constexpr int TILE = 32, STEP = 8;

extern "C" __global__ void __launch_bounds__(TILE *STEP)
transpose(const float *in, float *out, int rows, int columns) {
  __shared__ float tile[TILE][PITCH];
  int left = blockIdx.x * TILE, top = blockIdx.y * TILE;
#pragma unroll
  for (int j = threadIdx.y; j < TILE; j += STEP) {
    bool inside = top + j < rows && left + threadIdx.x < columns;
    store_shared(&tile[j][threadIdx.x], inside ? in[(size_t)(top + j) * columns + left + threadIdx.x] : 0.f);
  }
  __syncthreads();
#pragma unroll
  for (int j = threadIdx.y; j < TILE; j += STEP) {
    float number = load_word(&tile[threadIdx.x][j]);
    if (left + j < columns && top + threadIdx.x < rows) out[(size_t)(left + j) * rows + top + threadIdx.x] = number;
  }
}
