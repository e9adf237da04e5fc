// What micros share: a clock, and an answer. An entry of the answer is four numbers: cycles, how many operations they
// took, 0 where the results were right, and a sum that the host checks. Data of all kinds are what `questions.py` says.
#pragma once
#define WORDS_OF(x) #x
#define TEXT(x) WORDS_OF(x)

typedef unsigned long long Count;

__device__ __forceinline__ long long now() {
  long long cycles;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
  return cycles;
}

__device__ __forceinline__ unsigned lane_here() { return threadIdx.x % 32; }

__device__ __forceinline__ void tell(Count *out, unsigned entry, long long cycles, Count operations, bool right,
                                     Count sum = 0) {
  out[4 * entry] = cycles;
  out[4 * entry + 1] = operations;
  out[4 * entry + 2] = right ? 0 : 1;
  out[4 * entry + 3] = sum;
}

// Add up a number of all threads of a block; all of them get the sum.
__device__ __forceinline__ Count sum_of_block(Count own) {
  __shared__ Count sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  atomicAdd(&sum, own);
  __syncthreads();
  return sum;
}
