// How many bytes does each level give?
//
// Hypothesis: L1 gives the 128 bytes a cycle that its width says. L2 gives what others measured on this chip, twice the
// rate of memory. Memory gives what `ridgeline calibrate` found.
//
// Second round: the first one found 5.7 TB/s where others have 9.8. Their blocks read the same pieces, four at a time. If
// what is between L2 and the multiprocessors gives one answer to several that ask at the same time, this gives 9.7.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | L1, 128 KB of each multiprocessor | 126 | B/cycle | LOAD=ca SPREAD=0 n=8192 rounds=200 grid=all block=1024 check=each | 126, H200 [rrze] |
// | L2, 17 MB | 9.7 | TB/s | LOAD=cg SPREAD=1 flight=8 n=1081344 rounds=40 grid=all block=1024 check=sum | 9.8, H200 [rrze] |
// | L2, 35 MB | 9.4 | TB/s | LOAD=cg SPREAD=1 flight=8 n=2162688 rounds=20 grid=all block=1024 check=sum | 9.5, H200, 37 MB [rrze] |
// | L2, 17 MB, each piece for four blocks (second round) | 9.7 | TB/s | LOAD=cg SPREAD=1 SHARE=4 flight=8 n=1081344 rounds=40 grid=all block=1024 check=sum times=4 | 9.8, H200 [rrze] |
// | memory, 2.2 GB | 4.4 | TB/s | LOAD=cg SPREAD=1 flight=8 n=138412032 rounds=1 grid=all block=1024 check=sum | 3.9, H200 [rrze] |
#include "micro.cuh"

#ifndef SHARE
#define SHARE 1
#endif

constexpr int FLIGHT = 8;

// `n` pieces of 16 bytes, of which each block reads all, or its share, which it may have with others. n is a multiple of the loads of one turn.
extern "C" __global__ void __launch_bounds__(1024, 1)
    micro(Count *out, const uint4 *data, unsigned n, unsigned step, unsigned start, unsigned rounds) {
  unsigned parts = SPREAD ? gridDim.x / SHARE : 1, stride = parts * blockDim.x;
  const uint4 *first = data + threadIdx.x + blockIdx.x % parts * blockDim.x;
  unsigned turns = n / (stride * FLIGHT), sum = 0;
  __syncthreads();
  long long begin = now();
  for (unsigned round = 0; round < rounds; ++round) {
    const uint4 *from = first;
    for (unsigned turn = 0; turn < turns; ++turn) {
      uint4 x[FLIGHT];
#pragma unroll
      for (int i = 0; i < FLIGHT; ++i, from += stride)
        asm volatile("ld.global." TEXT(LOAD) ".v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[i].x), "=r"(x[i].y), "=r"(x[i].z), "=r"(x[i].w)
                     : "l"(from));
#pragma unroll
      for (int i = 0; i < FLIGHT; ++i) sum += x[i].x + x[i].y + x[i].z + x[i].w;
    }
  }
  __syncthreads();
  long long cycles = now() - begin;
  Count all = sum_of_block(sum), bytes = 16ull * rounds * turns * FLIGHT * blockDim.x;
  if (threadIdx.x == 0) tell(out, blockIdx.x, cycles, bytes, true, all);
}
