// What do lanes of a warp pay to learn about each other?
//
// Hypothesis: a shuffle goes through the unit of shared memory, so it takes as long as a load from there, and one starts
// each cycle. A vote is an instruction of the registers. `redux` does in hardware what five shuffles do, in a fifth of
// the time. A match compares all pairs, lane by lane, unless all lanes shall be alike.
// Rates are assumed: 32 lanes of shuffles a cycle, 64 of votes, 16 of reductions.
//
// Second round: a match of any lane took 105 cycles for eight different values, not 200 for 32 lanes. If it goes value by
// value, it takes as long as a match of all lanes where there is one, and 13 cycles more for each other one.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | shuffle by index, one after the other | 24 | cycles | OP=0 rounds=2000 | |
// | shuffle by exclusive or, one after the other | 24 | cycles | OP=1 rounds=2000 | |
// | a test and a vote of it, one after the other | 18 | cycles | OP=2 rounds=2000 | |
// | match of any lane, one after the other | 200 | cycles | OP=3 rounds=500 | |
// | match of any lane, one value for all, one after the other (second round) | 28 | cycles | OP=3 GROUP=32 rounds=500 | |
// | match of any lane, 32 values, one after the other (second round) | 420 | cycles | OP=3 GROUP=1 rounds=500 | |
// | match of all lanes, one after the other | 25 | cycles | OP=4 rounds=2000 | |
// | redux: addition and largest, one after the other | 30 | cycles | OP=5 rounds=2000 | |
// | five shuffles: addition and largest, one after the other | 145 | cycles | OP=6 rounds=500 | |
// | shuffles by index, 32 warps | 1 | cycles | OP=0 CHAINS=4 rounds=500 block=1024 | |
// | tests and votes, 32 warps | 0.5 | cycles | OP=2 CHAINS=4 rounds=500 block=1024 | |
// | matches of any lane, 32 warps | 16 | cycles | OP=3 CHAINS=4 rounds=100 block=1024 | |
// | redux, 32 warps | 2 | cycles | OP=5 CHAINS=4 rounds=500 block=1024 | |
// | five shuffles, 32 warps | 5 | cycles | OP=6 CHAINS=4 rounds=100 block=1024 | |
#include "micro.cuh"
#ifndef CHAINS
#define CHAINS 1
#endif
#ifndef GROUP
#define GROUP 4  // lanes with the same value
#endif

constexpr unsigned PATTERN = 0x5a5a1234;

__device__ __forceinline__ unsigned larger(unsigned x, int mask) {
  unsigned y;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(y) : "r"(x), "r"(mask));
  return x > y ? x : y;
}

__device__ __forceinline__ unsigned first() { return OP == 2 ? PATTERN : OP == 3 ? lane_here() / GROUP : OP == 4 ? 7 : OP < 2 ? lane_here() : 0; }

__device__ __forceinline__ unsigned apply(unsigned x) {
  unsigned lane = lane_here(), y = x;
  if (OP == 0) asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(y) : "r"(x), "r"((lane + 1) % 32));
  if (OP == 1) asm volatile("shfl.sync.bfly.b32 %0, %1, 5, 0x1f, 0xffffffff;" : "=r"(y) : "r"(x));
  if (OP == 2)
    asm volatile("{\n.reg .pred p;\n.reg .b32 t;\nand.b32 t, %1, %2;\nsetp.ne.u32 p, t, 0;\n"
                 "vote.sync.ballot.b32 %0, p, 0xffffffff;\n}" : "=r"(y) : "r"(x), "r"(1u << lane));
  if (OP == 3) asm volatile("match.any.sync.b32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  if (OP == 4) asm volatile("match.all.sync.b32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  if (OP == 5) asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x + lane));
  if (OP == 6) {
    y = x + lane;
    for (int mask = 16; mask; mask /= 2) y = larger(y, mask);
  }
  return y;
}

__device__ __forceinline__ unsigned last(unsigned rounds) {
  unsigned lane = lane_here();
  if (OP == 0) return (lane + rounds) % 32;
  if (OP == 1) return rounds % 2 ? lane ^ 5 : lane;
  if (OP == 2) return PATTERN;
  if (OP == 3) return (unsigned)((1ull << GROUP) - 1) << lane / GROUP * GROUP;
  if (OP == 4) return ~0u;
  return 31 * rounds;
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    micro(Count *out, const unsigned *data, unsigned n, unsigned step, unsigned start, unsigned rounds) {
  unsigned x[CHAINS];
#pragma unroll
  for (int i = 0; i < CHAINS; ++i) x[i] = first();
  __syncthreads();
  long long begin = now();
#pragma unroll 4
  for (unsigned round = 0; round < rounds; ++round)
#pragma unroll
    for (int i = 0; i < CHAINS; ++i) x[i] = apply(x[i]);
  bool right = true;
#pragma unroll
  for (int i = 0; i < CHAINS; ++i) right &= x[i] == last(rounds);
  __syncthreads();
  long long cycles = now() - begin;
  right = __syncthreads_and(right);
  if (threadIdx.x == 0) tell(out, 0, cycles, (Count)rounds * CHAINS * blockDim.x / 32, right);
}
