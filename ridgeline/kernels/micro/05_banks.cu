// How many cycles of shared memory does a load of a warp take?
//
// Hypothesis: 32 banks of 4 bytes give a word each in a cycle. Lanes that want different words of one bank wait for each
// other, and lanes that want the same word do not. A load of 16 bytes a lane takes four cycles, by quarters of a warp.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | neighbouring words | 1 | cycles | step=1 rounds=500 block=1024 | |
// | one word for all lanes | 1 | cycles | step=0 rounds=500 block=1024 | |
// | every 2nd word | 2 | cycles | step=2 rounds=500 block=1024 | |
// | every 3rd word | 1 | cycles | step=3 rounds=500 block=1024 | |
// | every 4th word | 4 | cycles | step=4 rounds=500 block=1024 | |
// | every 8th word | 8 | cycles | step=8 rounds=500 block=1024 | |
// | every 16th word | 16 | cycles | step=16 rounds=500 block=1024 | |
// | every 32nd word | 32 | cycles | step=32 rounds=500 block=1024 | |
// | every 33rd word: a padded column | 1 | cycles | step=33 rounds=500 block=1024 | |
// | 8 bytes a lane | 2 | cycles | WIDE=2 step=2 rounds=500 block=1024 | |
// | 16 bytes a lane | 4 | cycles | WIDE=4 step=4 rounds=500 block=1024 | |
// | 16 bytes a lane, rows of 128 bytes | 32 | cycles | WIDE=4 step=32 rounds=500 block=1024 | |
#include "micro.cuh"
#ifndef WIDE
#define WIDE 1
#endif

extern "C" __global__ void __launch_bounds__(1024, 1)
    micro(Count *out, const unsigned *data, unsigned n, unsigned step, unsigned start, unsigned rounds) {
  __shared__ __align__(16) unsigned own[2048];
  for (unsigned i = threadIdx.x; i < 2048; i += blockDim.x) own[i] = i;
  unsigned at = (unsigned)__cvta_generic_to_shared(own + lane_here() * step), sum = 0;
  __syncthreads();
  long long begin = now();
#pragma unroll 1
  for (unsigned round = 0; round < rounds; ++round)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      unsigned x, y, z, w;
      if (WIDE == 1) asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(x) : "r"(at));
      if (WIDE == 2) asm volatile("ld.volatile.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(at));
      if (WIDE == 4)
        asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "r"(at));
      sum += x;
    }
  __syncthreads();
  long long cycles = now() - begin;
  bool right = __syncthreads_and(sum == rounds * 8 * lane_here() * step);
  if (threadIdx.x == 0) tell(out, 0, cycles, (Count)rounds * 8 * blockDim.x / 32, right);
}
