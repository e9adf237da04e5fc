// How long does a load take whose address is the result of the load before, by the memory that answers?
//
// Hypothesis: three plateaus. The first two are those that others measured on the same chip. A set of 40 MB does not fit
// half of the L2 cache, and each multiprocessor reads through its half, so that part of it comes from memory.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | shared memory, 16 KB | 29 | cycles | LOAD=shared lines=128 rounds=20000 | |
// | L1, 16 KB | 33 | cycles | LOAD=global.ca lines=128 rounds=20000 | 32, GH200 [rrze]; 40, H100 [dewing] |
// | L2, 1 MB | 280 | cycles | LOAD=global.cg lines=8192 rounds=20000 | 280, GH200 [rrze]; 291, H100 [dewing] |
// | L2, 16 MB | 280 | cycles | LOAD=global.cg lines=131072 rounds=262144 | 280, GH200 [rrze] |
// | L2 and memory, 40 MB | 500 | cycles | LOAD=global.cg lines=327681 rounds=655362 | 503, GH200, 38 MB [rrze] |
// | memory, 512 MB | 690 | cycles | LOAD=global.cg lines=4194305 rounds=20000 fresh=1 | 680, GH200 [rrze]; 700, H100 [dewing] |
// | memory, 8 GB | 760 | cycles | LOAD=global.cg lines=67108865 rounds=20000 fresh=1 | |
#include "micro.cuh"

__device__ __forceinline__ Count next(Count at) {
  Count to;
  asm volatile("ld." TEXT(LOAD) ".u64 %0, [%1];" : "=l"(to) : "l"(at));
  return to;
}

// `n` lines of 128 bytes are a ring: each begins with the address of the line `step` further.
extern "C" __global__ void micro(Count *out, Count *data, unsigned n, unsigned step, unsigned start, unsigned rounds) {
  __shared__ Count own[128 * 16];
  for (unsigned i = 0; i < 128; ++i) own[16 * i] = __cvta_generic_to_shared(own + 16 * ((i + step) % 128));
  Count base = TEXT(LOAD)[0] == 's' ? (Count)__cvta_generic_to_shared(own) : (Count)data;
  Count at = base + 128ull * start;
  long long begin = now();
#pragma unroll 8
  for (unsigned i = 0; i < rounds; ++i) at = next(at);
  long long end = now() + (at == 0);
  tell(out, 0, end - begin, rounds, (at - base) / 128 == (start + (Count)rounds * step) % n);
}
