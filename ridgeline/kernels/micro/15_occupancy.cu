// Does arithmetic know how many blocks share a multiprocessor?
//
// Hypothesis: registers are given in granules of 256 for a warp, and dealt to four parts of the multiprocessor. Shared
// memory is given in granules of 128 bytes, with 1 KB for the driver. That gives what the driver answers, for every size
// of block and of memory.
// `ridgeline kernels occupancy` is that arithmetic.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | few registers: answers of the driver that differ | 0 | answers | LIVE=4 host=occupancy | |
// | 40 live numbers: answers of the driver that differ | 0 | answers | LIVE=40 host=occupancy | |
// | 90 live numbers: answers of the driver that differ | 0 | answers | LIVE=90 host=occupancy | |
// | 150 live numbers: answers of the driver that differ | 0 | answers | LIVE=150 host=occupancy | |
// | 220 live numbers: answers of the driver that differ | 0 | answers | LIVE=220 host=occupancy | |
#include "micro.cuh"

extern "C" __global__ void micro(Count *out, const unsigned *data, unsigned n, unsigned step, unsigned start,
                                 unsigned rounds) {
  extern __shared__ unsigned memory[];
  unsigned x[LIVE];
#pragma unroll
  for (int i = 0; i < LIVE; ++i) asm volatile("ld.global.u32 %0, [%1];" : "=r"(x[i]) : "l"(data + i * step));
  __syncthreads();
  for (unsigned round = 0; round < rounds; ++round)
#pragma unroll
    for (int i = 0; i < LIVE; ++i) x[i] = x[i] * x[(i + 1) % LIVE] + memory[0];
  Count sum = 0;
#pragma unroll
  for (int i = 0; i < LIVE; ++i) sum = sum * 3 + x[i];
  out[threadIdx.x] = sum;
}
