// Is a warp more worth the same as an independent instruction more?
//
// Hypothesis: an FMA takes 4 cycles, and each of four schedulers starts one for 32 lanes every cycle. So 16 are needed
// under way in a multiprocessor, and whether 16 warps have one each or 4 warps four each is the same. Fewer give their
// share of 128 lanes a cycle, more give nothing.
//
// Second round: 32 warps with a chain each gave 60. The machine code is FFMA R7, R7, R6, R0: two of its operands are in the
// even one of two banks of registers, which gives one a cycle, unless the instruction before left it for reuse. A factor
// that stands in the instruction needs no register, and then warps alone give 128.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | 1 warp, 1 chain | 8 | lanes/cycle | ILP=1 rounds=4000 block=32 | |
// | 4 warps, 1 chain each | 32 | lanes/cycle | ILP=1 rounds=4000 block=128 | |
// | 4 warps, 2 chains each | 64 | lanes/cycle | ILP=2 rounds=4000 block=128 | |
// | 4 warps, 4 chains each | 128 | lanes/cycle | ILP=4 rounds=4000 block=128 | |
// | 8 warps, 1 chain each | 64 | lanes/cycle | ILP=1 rounds=4000 block=256 | |
// | 8 warps, 2 chains each | 128 | lanes/cycle | ILP=2 rounds=4000 block=256 | |
// | 16 warps, 1 chain each | 128 | lanes/cycle | ILP=1 rounds=4000 block=512 | |
// | 32 warps, 1 chain each | 128 | lanes/cycle | ILP=1 rounds=4000 block=1024 | |
// | 16 warps, 1 chain each, the factor in the instruction (second round) | 128 | lanes/cycle | ILP=1 HALF=1 rounds=4000 block=512 | |
// | 32 warps, 1 chain each, the factor in the instruction (second round) | 128 | lanes/cycle | ILP=1 HALF=1 rounds=4000 block=1024 | |
// | 4 warps, 8 chains each | 128 | lanes/cycle | ILP=8 rounds=4000 block=128 | |
#include "micro.cuh"
#ifndef HALF
#define HALF 0
#endif

// step is 1, which no compiler knows.
extern "C" __global__ void __launch_bounds__(1024, 1)
    micro(Count *out, const unsigned *data, unsigned n, unsigned step, unsigned start, unsigned rounds) {
  float x[ILP], one = float(step), add = float(step + threadIdx.x % 3);
#pragma unroll
  for (int i = 0; i < ILP; ++i) x[i] = HALF ? 2 * add : float(i);
  __syncthreads();
  long long begin = now();
#pragma unroll 16
  for (unsigned round = 0; round < rounds; ++round)
#pragma unroll
    for (int i = 0; i < ILP; ++i) x[i] = fmaf(x[i], HALF ? 0.5f : one, add);
  bool right = true;
#pragma unroll
  for (int i = 0; i < ILP; ++i) right &= x[i] == (HALF ? 2 * add : float(i) + float(rounds) * add);
  __syncthreads();
  long long cycles = now() - begin;
  right = __syncthreads_and(right);
  if (threadIdx.x == 0) tell(out, 0, cycles, (Count)rounds * ILP * blockDim.x, right);
}
