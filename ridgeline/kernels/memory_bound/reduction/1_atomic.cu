// Reduction 1. Atomic: every thread adds its number to the one result.
//
// Idea      The memory system adds. No thread knows of another.
// Bytes     4 a number are read.
// Limit     Atomics to one address, which L2 does one after the other; those of a warp are not added up first.
// Next      Sums of blocks.
#include "rows.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) reduction(const float *x, float *out, size_t n) {
  size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x;
  if (i < n) atomicAdd(out, x[i]);
}
