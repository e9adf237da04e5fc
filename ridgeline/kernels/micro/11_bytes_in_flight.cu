// How many bytes must be under way for the full rate of memory, and does it matter whose they are?
//
// Hypothesis: by Little's law 4.4 TB/s times the 350 ns of a load are 1.5 MB, 11.7 KB of each multiprocessor. With less
// the rate is what is under way over 350 ns; more threads and more loads of each thread are the same.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | 128 threads, a load each: 2 KB | 0.77 | TB/s | ILP=1 n=16777216 grid=all block=128 | |
// | 256 threads, a load each: 4 KB | 1.55 | TB/s | ILP=1 n=33554432 grid=all block=256 | |
// | 128 threads, two loads each: 4 KB | 1.55 | TB/s | ILP=2 n=33554432 grid=all block=128 | |
// | 512 threads, a load each: 8 KB | 3.1 | TB/s | ILP=1 n=67108864 grid=all block=512 | |
// | 128 threads, four loads each: 8 KB | 3.1 | TB/s | ILP=4 n=67108864 grid=all block=128 | |
// | 1024 threads, a load each: 16 KB | 4.4 | TB/s | ILP=1 n=67108864 grid=all block=1024 | |
// | 128 threads, eight loads each: 16 KB | 4.4 | TB/s | ILP=8 n=67108864 grid=all block=128 | |
#include "micro.cuh"

// `n` pieces of 16 bytes. The loads of a turn wait for the sums of the turn before.
extern "C" __global__ void __launch_bounds__(1024, 1)
    micro(Count *out, const uint4 *data, unsigned n, unsigned step, unsigned start, unsigned rounds) {
  unsigned stride = gridDim.x * blockDim.x, sum = 0, turns = n / (stride * ILP);
  const uint4 *from = data + blockIdx.x * blockDim.x + threadIdx.x;
  long long begin = now();
#pragma unroll 1
  for (unsigned turn = 0; turn < turns; ++turn) {
    uint4 x[ILP];
#pragma unroll
    for (int i = 0; i < ILP; ++i, from += stride)
      asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[i].x), "=r"(x[i].y), "=r"(x[i].z), "=r"(x[i].w)
                   : "l"(from), "r"(sum));
#pragma unroll
    for (int i = 0; i < ILP; ++i) sum += x[i].x + x[i].y + x[i].z + x[i].w;
  }
  long long cycles = now() - begin;
  Count all = sum_of_block(sum), bytes = 16ull * turns * ILP * blockDim.x;
  if (threadIdx.x == 0) tell(out, blockIdx.x, cycles, bytes, true, all);
}
