// Reduction 2. A tree in shared memory: half of the threads add, then a quarter, ...
//
// Idea      A block adds 256 numbers in eight steps, and one atomic gives them to the result.
// Bytes     4 a number.
// Limit     Barriers: ten in a block that has 1 KB to read, and an atomic for each block.
// Next      Lanes that read one another's registers.
#include "rows.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) reduction(const float *x, float *out, size_t n) {
  __shared__ Sum slots[THREADS];
  size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x;
  Sum all = by_tree(Sum{i < n ? x[i] : 0}, slots);
  if (threadIdx.x == 0) atomicAdd(out, all.value);
}
