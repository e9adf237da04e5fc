// Transpose 1. Naive: rows are read, columns are written.
//
// Idea      out[x][y] = in[y][x]. A warp reads 32 neighbours of a row: one line of 128 bytes. It writes them `rows` numbers
//           apart: 32 lines, of each of which it fills 4 bytes.
// Bytes     8 a number from and to memory. Between the multiprocessors and L2 a write is a sector of 32 bytes: 32 a number.
// Limit     Requests: a store of a warp is 32 sectors in place of 4. L2 puts the parts of a line together if it holds it
//           long enough, so DRAM may not see them.
// Next      A turn in shared memory.
#include "numbers.cuh"

constexpr int TILE = 32, STEP = 8;

extern "C" __global__ void __launch_bounds__(TILE *STEP)
transpose(const float *in, float *out, int rows, int columns) {
  int x = blockIdx.x * TILE + threadIdx.x;
  for (int y = blockIdx.y * TILE + threadIdx.y; y < min(rows, int(blockIdx.y + 1) * TILE); y += STEP)
    if (x < columns) out[(size_t)x * rows + y] = in[(size_t)y * columns + x];
}
