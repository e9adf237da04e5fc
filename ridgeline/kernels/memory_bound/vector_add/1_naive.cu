// Vector add 1. Naive: a number a thread.
//
// Idea      Neighbours in a warp read neighbours in memory, so each load is one line of 128 bytes: coalesced.
// Bytes     12 a number: two are read, one is written.
// Limit     Bytes on their way: a thread waits with 8 of them, so 2,048 threads of a multiprocessor have 16 KB under way,
//           and memory's rate times its latency (4.8 TB/s, some 600 ns) is 22 KB for each.
// Next      More bytes for each thread.
#include "numbers.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
vector_add(const float *a, const float *b, float *c, size_t n) {
  size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}
