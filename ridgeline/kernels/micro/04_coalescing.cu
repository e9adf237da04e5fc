// What do lanes cost that do not read neighbouring words?
//
// Hypothesis: memory is read in pieces of 64 bytes, two sectors. So a stride of 2 words halves the rate of useful bytes,
// 16 words leave a sixteenth, and wider strides cost no more.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | every word | 4.2 | TB/s | n=1073741824 step=1 grid=2x block=1024 check=strided | |
// | every 2nd | 2.2 | TB/s | n=1073741824 step=2 grid=2x block=1024 check=strided | |
// | every 4th | 1.1 | TB/s | n=1073741824 step=4 grid=2x block=1024 check=strided | |
// | every 8th | 0.55 | TB/s | n=1073741824 step=8 grid=2x block=1024 check=strided | |
// | every 16th | 0.27 | TB/s | n=1073741824 step=16 grid=2x block=1024 check=strided | |
// | every 32nd | 0.27 | TB/s | n=1073741824 step=32 grid=2x block=1024 check=strided | |
#include "micro.cuh"

constexpr unsigned FLIGHT = 8;

extern "C" __global__ void __launch_bounds__(1024, 2)
    micro(Count *out, const unsigned *data, unsigned n, unsigned step, unsigned start, unsigned rounds) {
  unsigned stride = gridDim.x * blockDim.x, total = n / step, sum = 0;
  __syncthreads();
  long long begin = now();
  for (unsigned first = blockIdx.x * blockDim.x + threadIdx.x; first < total; first += stride * FLIGHT) {
    unsigned x[FLIGHT];
#pragma unroll
    for (unsigned i = 0; i < FLIGHT; ++i) {
      unsigned at = first + i * stride;
      x[i] = 0;
      if (at < total) asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(x[i]) : "l"(data + (Count)at * step));
    }
#pragma unroll
    for (unsigned i = 0; i < FLIGHT; ++i) sum += x[i];
  }
  __syncthreads();
  long long cycles = now() - begin;
  Count all = sum_of_block(sum);
  if (threadIdx.x == 0) tell(out, blockIdx.x, cycles, blockIdx.x ? 0 : 4ull * total, true, all);
}
