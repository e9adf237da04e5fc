// Transpose 5. Vectors: 16 bytes a load and a store, on every side.
//
// Idea      A thread reads four rows of four numbers, turns this square in its registers, and puts the four columns into
//           shared memory as vectors. A tile is 64 x 64. Vector v of column c lies at place v ^ c / 4 of its column, so the eight
//           lanes that go together meet in no bank, neither there nor when vectors are read.
// Bytes     8 a number; a thread has 64 under way.
// Limit     Memory.
#include "rows.cuh"

constexpr int TILE = 64, VECTORS = TILE / 4, THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
transpose(const float *in, float *out, int rows, int columns) {
  __shared__ __align__(16) float4 tile[TILE][VECTORS];  // of columns
  int x = threadIdx.x % VECTORS, y = threadIdx.x / VECTORS, left = blockIdx.x * TILE, top = blockIdx.y * TILE;
  float4 square[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int row = top + y * 4 + i, column = left + x * 4;
    square[i] = make_float4(0, 0, 0, 0);
    if (row < rows && column < columns)
      square[i] = *reinterpret_cast<const float4 *>(in + (size_t)row * columns + column);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    auto at = [&](int i) { return j == 0 ? square[i].x : j == 1 ? square[i].y : j == 2 ? square[i].z : square[i].w; };
    store_vector(&tile[x * 4 + j][y ^ x], make_float4(at(0), at(1), at(2), at(3)));
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int column = y * 4 + i;
    float4 vector = load_shared(&tile[column][x ^ y].x);
    if (left + column < columns && top + x * 4 < rows)
      *reinterpret_cast<float4 *>(out + (size_t)(left + column) * rows + top + x * 4) = vector;
  }
}
