// How far is the shared memory of another block of the cluster?
//
// Hypothesis: a load through the network of the cluster takes 180 cycles, two thirds of one from L2. Each multiprocessor
// gets a quarter of the 64 bytes a cycle that L2 gives it, in loads of 16 bytes a lane.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | the block's own, one load after the other | 30 | cycles | FAR=0 rounds=5000 grid=2 block=32 step=1 | |
// | the other block's, one load after the other | 180 | cycles | FAR=1 rounds=5000 grid=2 block=32 step=1 | |
// | all from the other block, by 16 bytes a lane | 16 | B/cycle | FAR=1 MANY=1 rounds=300 grid=132 block=1024 step=1 | |
#include "micro.cuh"
#include "ptx.cuh"
#ifndef MANY
#define MANY 0
#endif

constexpr unsigned WORDS = 4096;

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(1024, 1)
    micro(Count *out, const unsigned *data, unsigned n, unsigned step, unsigned start, unsigned rounds) {
  __shared__ __align__(16) unsigned own[WORDS];
  unsigned rank = cluster_rank(), from = shared_address(own), here, to, sum = 0, at = 0;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(here) : "r"(from), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(from), "r"(rank ^ FAR));
  for (unsigned i = threadIdx.x; i < WORDS; i += blockDim.x)  // a ring of addresses, or numbers that say whose they are
    own[i] = MANY ? rank * 1000 + i % 4 : here + (i + 33) % WORDS * 4;
  __syncthreads();
  cluster_sync();
  long long begin = now();
  if (MANY) {
    unsigned place = to + threadIdx.x % (WORDS / 4) * 16;
#pragma unroll 1
    for (unsigned round = 0; round < rounds; ++round)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        unsigned x, y, z, w;
        asm volatile("ld.volatile.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "r"(place));
        sum += x + y + z + w;
      }
  } else {
    at = to;
    for (unsigned round = 0; round < rounds; ++round) asm volatile("ld.shared::cluster.u32 %0, [%0];" : "+r"(at));
  }
  __syncthreads();
  long long cycles = now() - begin + (at == 7);
  bool right = MANY ? sum == rounds * 4 * (4 * 1000 * (rank ^ FAR) + 6)
                    : at - to == (Count)rounds * 33 % WORDS * 4;
  right = __syncthreads_and(right);
  cluster_sync();
  if (threadIdx.x == 0) tell(out, blockIdx.x, cycles, MANY ? (Count)rounds * 64 * blockDim.x : rounds, right);
}
