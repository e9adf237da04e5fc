// Reduction 5. Cooperative groups: all blocks meet, and one launch is enough.
//
// Idea      A cooperative launch promises that all blocks run at the same time, so the grid may meet as a block does
//           (grid.sync). The first block adds the blocks' sums behind that. Groups say in words who takes part: a tile of 32
//           lanes reduces, a block and a grid meet.
// Bytes     As rung 4.
// Limit     Memory. A meeting of the grid takes 1 to 2 µs, about as long as another launch.
#include "groups.cuh"
#include "ptx.cuh"

namespace cg = cooperative_groups;
constexpr int THREADS = 256, OWN = 4;

__device__ __forceinline__ float sum_of_block(float own, float *slots) {
  cg::thread_block block = cg::this_thread_block();
  auto warp = cg::tiled_partition<32>(block);
  own = cg::reduce(warp, own, cg::plus<float>());
  if (warp.thread_rank() == 0) slots[warp.meta_group_rank()] = own;
  block.sync();
  own = warp.thread_rank() < warp.meta_group_size() ? slots[warp.thread_rank()] : 0;
  block.sync();
  return cg::reduce(warp, own, cg::plus<float>());
}

// partials: a number for each block.
extern "C" __global__ void __launch_bounds__(THREADS)
reduction(const float *x, float *out, size_t n, float *partials) {
  float *slots = reinterpret_cast<float *>(dynamic_shared());
  cg::grid_group grid = cg::this_grid();
  size_t whole = n / 4, step = gridDim.x * (size_t)(THREADS * OWN);
  float sum = blockIdx.x == 0 && threadIdx.x < n % 4 ? x[whole * 4 + threadIdx.x] : 0;
  for (size_t first = blockIdx.x * (size_t)(THREADS * OWN) + threadIdx.x; first < whole; first += step) {
    float4 own[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      size_t at = first + i * THREADS;
      own[i] = at < whole ? reinterpret_cast<const float4 *>(x)[at] : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) sum += (own[i].x + own[i].y) + (own[i].z + own[i].w);
  }
  sum = sum_of_block(sum, slots);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
  grid.sync();
  if (blockIdx.x > 0) return;
  sum = 0;
  for (int i = threadIdx.x; i < gridDim.x; i += THREADS) sum += partials[i];
  sum = sum_of_block(sum, slots);
  if (threadIdx.x == 0) *out = sum;
}
