// CUDA's cooperative groups on a GPU. In the emulator the few that rungs use: a block, its tiles of 32 lanes, and the grid,
// whose blocks the emulator runs as one cluster.
#pragma once
#ifdef __CUDACC__
#define _CG_LIMIT_INCLUDED_DEPENDENCIES  // no headers of CCCL
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#else
#include "emulator.cuh"

namespace cooperative_groups {

struct thread_block {
  void sync() const { __syncthreads(); }
};
inline thread_block this_thread_block() { return {}; }

template <unsigned SIZE> struct thread_block_tile {
  static_assert(SIZE == 32, "the emulator knows tiles of a warp");
  unsigned thread_rank() const { return emulator::current->lane; }
  unsigned meta_group_rank() const { return emulator::current->warp; }
  unsigned meta_group_size() const { return unsigned(emulator::current->block->warps.size()); }
};
template <unsigned SIZE> thread_block_tile<SIZE> tiled_partition(const thread_block &) { return {}; }

template <class T> struct plus {
  T operator()(T a, T b) const { return a + b; }
};
template <class T, class F> T reduce(const thread_block_tile<32> &, T own, F add) {
  for (int mask = 16; mask > 0; mask /= 2) own = add(own, __shfl_xor_sync(~0u, own, mask));
  return own;
}

struct grid_group {
  void sync() const {
    unsigned all = unsigned(emulator::blocks.size() * emulator::blocks[0].threads.size());
    emulator::meet(emulator::cluster_barrier, all, "grid.sync");
  }
};
inline grid_group this_grid() { return {}; }

}  // namespace cooperative_groups
#endif
