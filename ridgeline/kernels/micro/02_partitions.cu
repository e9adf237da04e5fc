// Is the L2 cache one memory, or is half of it far from a multiprocessor?
//
// Hypothesis: the chip has two partitions of L2. A line is near to half of the multiprocessors, and for the others the
// way leads through the other partition, which takes 100 cycles more. 280 cycles are the mean of both.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | one multiprocessor: the nearest tenth of lines | 230 | cycles | BY_LINE=1 lines=2048 step=0 rounds=16 entries=2048 percentile=10 | |
// | one multiprocessor: the farthest tenth of lines | 330 | cycles | BY_LINE=1 lines=2048 step=0 rounds=16 entries=2048 percentile=90 | |
// | one line: the nearest tenth of multiprocessors | 230 | cycles | BY_LINE=0 lines=2048 step=0 rounds=64 grid=all percentile=10 | |
// | one line: the farthest tenth of multiprocessors | 330 | cycles | BY_LINE=0 lines=2048 step=0 rounds=64 grid=all percentile=90 | |
#include "micro.cuh"

// Each line holds its own address, so that a load of it can wait for the load before. The line behind the last one has
// the number of the block whose turn it is.
__device__ __forceinline__ void ask(Count *out, unsigned entry, Count line, unsigned rounds) {
  Count at = line;
  asm volatile("ld.global.cg.u64 %0, [%0];" : "+l"(at));  // it is in L2 now
  long long begin = now();
  for (unsigned i = 0; i < rounds; ++i) asm volatile("ld.global.cg.u64 %0, [%0];" : "+l"(at));
  long long end = now() + (at == 0);
  tell(out, entry, end - begin, rounds, at == line);
}

extern "C" __global__ void micro(Count *out, Count *data, unsigned n, unsigned step, unsigned start, unsigned rounds) {
  if (BY_LINE) {
    for (unsigned i = 0; i < n; ++i) ask(out, i, (Count)(data + 16ull * i), rounds);
    return;
  }
  volatile Count *turn = data + 16ull * n;
  while (*turn != blockIdx.x) __nanosleep(2000);
  ask(out, blockIdx.x, (Count)data, rounds);
  __threadfence();
  *turn = blockIdx.x + 1 == gridDim.x ? 0 : blockIdx.x + 1;
}
