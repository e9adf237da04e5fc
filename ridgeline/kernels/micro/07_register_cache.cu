// Do registers of a warp replace shared memory as the cache of a stencil?
//
// Hypothesis: a sum of seven neighbours reads seven words of shared memory and writes one, eight cycles of that unit for
// 32 sums. Shuffles read the six that are not the lane's own through the same unit: six cycles, no gain worth the name.
// The gain comes from eight neighbours in each lane: six shuffles are then enough for eight sums, and the limit is no
// longer that unit but 7 FMAs, 1.75 cycles.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | shared memory, a sum a lane | 8 | cycles | WAY=0 rounds=256 block=1024 | |
// | shuffles, a sum a lane | 6 | cycles | WAY=1 rounds=256 block=1024 | |
// | shuffles, eight sums a lane | 1.75 | cycles | WAY=2 rounds=256 block=1024 | |
#include "micro.cuh"

constexpr int EACH = WAY == 2 ? 8 : 1, RADIUS = 3, NUMBERS = 32 * EACH;
__device__ constexpr float WEIGHTS[7] = {0.0625f, 0.125f, 0.1875f, 0.25f, 0.1875f, 0.125f, 0.0625f};

__device__ __forceinline__ float shuffled(float x, int from) { return __shfl_sync(~0u, x, from); }

// The numbers of a warp are a ring: number EACH · lane + i is x[i] of a lane. `own`: the warp's shared memory.
__device__ __forceinline__ void smooth(float (&x)[EACH], float *own) {
  int lane = lane_here();
  float wide[EACH + 2 * RADIUS];
  if (WAY == 0) {
    own[lane] = x[0];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 7; ++i) wide[i] = *(volatile float *)(own + (lane + i + 32 - RADIUS) % 32);
    __syncwarp();
  } else {
#pragma unroll
    for (int i = 0; i < EACH; ++i) wide[RADIUS + i] = x[i];
#pragma unroll
    for (int i = 0; i < RADIUS; ++i) {  // those before and behind the lane's own
      wide[i] = WAY == 2 ? shuffled(x[EACH - RADIUS + i + 0], (lane + 31) % 32) : shuffled(x[0], (lane + 29 + i) % 32);
      wide[RADIUS + EACH + i] = WAY == 2 ? shuffled(x[i], (lane + 1) % 32) : shuffled(x[0], (lane + 1 + i) % 32);
    }
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 7; ++j) sum = fmaf(WEIGHTS[j], wide[i + j], sum);
    x[i] = sum;
  }
}

__device__ __forceinline__ float number(int at) { return float(at * 37 % 101) + 1.f; }

extern "C" __global__ void __launch_bounds__(1024, 1)
    micro(Count *out, float *data, unsigned n, unsigned step, unsigned start, unsigned rounds) {
  __shared__ float own[1024];
  float x[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) x[i] = number(EACH * lane_here() + i);
  __syncthreads();
  long long begin = now();
#pragma unroll 1
  for (unsigned round = 0; round < rounds; ++round) smooth(x, own + threadIdx.x / 32 * 32);
  __syncthreads();
  long long cycles = now() - begin;
  // the same by the first thread, in global memory
  if (threadIdx.x == 0) {
    for (int i = 0; i < NUMBERS; ++i) data[i] = number(i);
    for (unsigned round = 0; round < rounds; ++round) {
      float *from = data + round % 2 * NUMBERS, *to = data + (round + 1) % 2 * NUMBERS;
      for (int i = 0; i < NUMBERS; ++i) {
        float sum = 0;
        for (int j = 0; j < 7; ++j) sum = fmaf(WEIGHTS[j], from[(i + j + NUMBERS - RADIUS) % NUMBERS], sum);
        to[i] = sum;
      }
    }
  }
  __syncthreads();
  bool right = true;
  for (int i = 0; i < EACH; ++i) right &= x[i] == data[rounds % 2 * NUMBERS + EACH * lane_here() + i];
  right = __syncthreads_and(right);
  if (threadIdx.x == 0) tell(out, 0, cycles, (Count)rounds * EACH * blockDim.x / 32, right);
}
