// What do additions of all threads to memory cost, by where they meet?
//
// Hypothesis: L2 adds one number a cycle to an address, so that all lanes of all warps at one address give 1.75 a
// nanosecond. A warp that adds up first, and lets one lane tell, is 32 times as fast for the same sum. Spread over
// addresses, each of the 96 slices of L2 adds to a sector of 8 words a cycle, less what the network leaves: 400 a
// nanosecond. In shared memory 32 lanes at one address take 32 turns of two cycles, and spread ones take two cycles.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | global memory, one address | 1.75 | /ns | WAY=0 n=1 step=0 rounds=64 grid=2x block=1024 check=total | |
// | global memory, one address, a lane for its warp | 56 | /ns | WAY=1 n=1 step=0 rounds=64 grid=2x block=1024 check=total | |
// | global memory, 32 neighbouring addresses | 28 | /ns | WAY=0 n=32 step=1 rounds=64 grid=2x block=1024 check=total | |
// | global memory, an address for each thread | 400 | /ns | WAY=0 n=270336 step=1 rounds=64 grid=2x block=1024 check=total | |
// | shared memory, one address | 64 | cycles | WAY=2 n=1 step=0 rounds=200 block=1024 | |
// | shared memory, one address, a lane for its warp | 4 | cycles | WAY=3 n=1 step=0 rounds=200 block=1024 | |
// | shared memory, an address for each lane | 2 | cycles | WAY=2 n=1024 step=1 rounds=200 block=1024 | |
// | shared memory, 32 addresses of one bank | 64 | cycles | WAY=2 n=1024 step=32 rounds=200 block=1024 | |
#include "micro.cuh"

// Each thread adds rounds times 1 + thread % 4. The compiler knows neither that addresses are one nor that numbers are.
extern "C" __global__ void __launch_bounds__(1024, 2)
    micro(Count *out, unsigned *data, unsigned n, unsigned step, unsigned start, unsigned rounds) {
  __shared__ unsigned own[1024];
  own[threadIdx.x] = 0;
  unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, number = 1 + threadIdx.x % 4;
  unsigned *to = data + (WAY < 2 ? thread * step % n : 0);
  unsigned place = (unsigned)__cvta_generic_to_shared(own + threadIdx.x * step % n);
  __syncthreads();
  long long begin = now();
  for (unsigned round = 0; round < rounds; ++round) {
    unsigned told = number;
    if (WAY % 2) asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(told) : "r"(number));
    if (WAY % 2 == 0 || lane_here() == 0) {
      if (WAY < 2)
        asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(told) : "memory");
      else
        asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(place), "r"(told) : "memory");
    }
  }
  __syncthreads();
  long long cycles = now() - begin;
  unsigned sum = WAY < 2 ? 0 : own[threadIdx.x];
  Count all = sum_of_block(sum), lanes = (Count)rounds * blockDim.x;
  bool right = WAY < 2 || all == lanes * 5 / 2;
  if (threadIdx.x == 0) tell(out, blockIdx.x, cycles, WAY < 2 ? lanes : lanes / 32, right, lanes * 5 / 2);
}
