// Norms 4. Cooperative groups: rung 3 in the words of CUDA's groups.
//
// Idea      A tile of 32 lanes reduces (cg::reduce makes the shuffles), the block meets, and each tile reduces the tiles' sums.
//           Who takes part is a value with a type, and not a mask and an arithmetic of indices.
// Bytes     As rung 3.
// Limit     As rung 3: the machine code is the same five SHFL a sum.
// Next      Rows that come while others are worked on.
#include "groups.cuh"
#include "rows.cuh"

#ifndef RMS
#define RMS 0
#endif
namespace cg = cooperative_groups;

__device__ __forceinline__ float sum_of_row(float own, float *slots) {
  cg::thread_block block = cg::this_thread_block();
  auto tile = cg::tiled_partition<32>(block);
  own = cg::reduce(tile, own, cg::plus<float>());
  if (blockDim.x == 32) return own;
  if (tile.thread_rank() == 0) slots[tile.meta_group_rank()] = own;
  block.sync();
  own = tile.thread_rank() < tile.meta_group_size() ? slots[tile.thread_rank()] : 0;
  return cg::reduce(tile, own, cg::plus<float>());
}

extern "C" __global__ void __launch_bounds__(1024)
norms(const Element *x, const Element *weight, const Element *bias, Element *y, int rows, int columns, float epsilon) {
  __shared__ float slots[2][32];
  int row = blockIdx.x * blockDim.y + threadIdx.y, width = columns / 8;
  if (row >= rows) return;
  Vector own[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    int at = vector_at<VECTORS>(v, 0);
    own[v] = {};
    if (at < width) own[v] = *reinterpret_cast<const Vector *>(x + (size_t)row * columns + at * 8);
  }
  float mean = 0, squares = 0;
  if (!RMS) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
#pragma unroll
      for (int i = 0; i < 8; ++i) mean += to_float(own[v].at[i]);
    mean = sum_of_row(mean, slots[0]) / columns;
  }
  stay_narrow(own);
#pragma unroll
  for (int v = 0; v < VECTORS; ++v)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float apart = vector_at<VECTORS>(v, 0) < width ? to_float(own[v].at[i]) - mean : 0;
      squares += apart * apart;
    }
  float scale = inverse_root(sum_of_row(squares, slots[1]) / columns + epsilon);
  stay_narrow(own);
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    int at = vector_at<VECTORS>(v, 0);
    if (at >= width) continue;
    Vector by = reinterpret_cast<const Vector *>(weight)[at], plus = {};
    if (!RMS) plus = reinterpret_cast<const Vector *>(bias)[at];
    *reinterpret_cast<Vector *>(y + (size_t)row * columns + at * 8) = each_number(own[v], [&](float z, int i) {
      return (z - mean) * scale * to_float(by.at[i]) + (RMS ? 0 : to_float(plus.at[i]));
    });
  }
}
