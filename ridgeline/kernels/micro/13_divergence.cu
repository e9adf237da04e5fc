// What does a branch cost whose lanes go different ways?
//
// Hypothesis: a warp walks the ways one after the other. So k ways of the same length take k times one way's time, and it
// does not matter how many lanes take each. Where lanes of different warps differ, nothing is lost.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | all lanes one way | 4 | cycles | WAYS=1 rounds=4000 | |
// | two ways, by halves of the warp | 8 | cycles | WAYS=2 BY=lane/16 rounds=4000 | |
// | two ways, by odd and even lanes | 8 | cycles | WAYS=2 BY=lane%2 rounds=4000 | |
// | two ways, one lane and 31 | 8 | cycles | WAYS=2 BY=(lane==5) rounds=4000 | |
// | four ways | 16 | cycles | WAYS=4 BY=lane%4 rounds=4000 | |
// | eight ways | 32 | cycles | WAYS=8 BY=lane%8 rounds=4000 | |
// | two ways, by warps | 4 | cycles | WAYS=2 BY=threadIdx.x/32%2 rounds=4000 block=128 | |
#include "micro.cuh"
#ifndef BY
#define BY 0
#endif

template <int WAY> __device__ __noinline__ float walk(float x, unsigned rounds, float one) {
#pragma unroll 16
  for (unsigned round = 0; round < rounds; ++round) x = fmaf(x, one, float(WAY + 1));
  return x;
}

extern "C" __global__ void micro(Count *out, const unsigned *data, unsigned n, unsigned step, unsigned start,
                                 unsigned rounds) {
  unsigned lane = lane_here(), way = (BY) + (lane & 0);
  float one = float(step), x = 0;  // step is 1
  __syncthreads();
  long long begin = now();
  switch (way) {
    case 0: x = walk<0>(x, rounds, one); break;
    case 1: x = walk<1>(x, rounds, one); break;
    case 2: x = walk<2>(x, rounds, one); break;
    case 3: x = walk<3>(x, rounds, one); break;
    case 4: x = walk<4>(x, rounds, one); break;
    case 5: x = walk<5>(x, rounds, one); break;
    case 6: x = walk<6>(x, rounds, one); break;
    case 7: x = walk<7>(x, rounds, one); break;
  }
  __syncthreads();
  long long cycles = now() - begin;
  bool right = __syncthreads_and(x == float(rounds * (way + 1)) && way < WAYS);
  if (threadIdx.x == 0) tell(out, 0, cycles, rounds, right);
}
