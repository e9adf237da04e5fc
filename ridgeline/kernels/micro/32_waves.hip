// How many waves share a SIMD, by registers, LDS, and the way in which LDS is shared?
//
// Hypothesis: gfx1100 has 1,536 registers a lane of a SIMD, given in 24 at a time: up to 96 leave all 16 waves, and 220
// leave 6. gfx942 has 512, of which 8 at a time: 64 leave 8 waves, and 220 leave two. 40 KB of LDS for a workgroup of 256
// fit three times into the 128 KB of a WGP, whose four SIMDs then have 6 waves each. In CU mode each half has 64 KB: one
// workgroup, whose 8 waves go to two SIMDs, 4 each. The compiler's own figure is compared.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | gfx1100, 64 live numbers | 16 | waves | LIVE=64 arch=gfx1100 count=occupancy | |
// | gfx1100, 190 live numbers | 7 | waves | LIVE=190 arch=gfx1100 count=occupancy | |
// | gfx942, 40 live numbers | 8 | waves | LIVE=40 arch=gfx942 count=occupancy | |
// | gfx942, 100 live numbers | 4 | waves | LIVE=100 arch=gfx942 count=occupancy | |
// | gfx942, 190 live numbers | 2 | waves | LIVE=190 arch=gfx942 count=occupancy | |
// | gfx1100, 40 KB of LDS | 6 | waves | LIVE=8 BYTES=40960 arch=gfx1100 count=occupancy | |
// | gfx1100, 40 KB of LDS, in CU mode | 4 | waves | LIVE=8 BYTES=40960 CU=1 arch=gfx1100 count=occupancy | |
// | gfx942, 40 KB of LDS | 1 | waves | LIVE=8 BYTES=40960 arch=gfx942 count=occupancy | |
// | gfx1100, shares its LDS by default | 1 | mode | LIVE=8 arch=gfx1100 count=workgroup_processor_mode | |
// | gfx1100, in CU mode | 0 | mode | LIVE=8 CU=1 arch=gfx1100 count=workgroup_processor_mode | |
// | gfx1100, lanes of a wave | 32 | lanes | LIVE=8 arch=gfx1100 count=wavefront_size | |
// | gfx942, lanes of a wave | 64 | lanes | LIVE=8 arch=gfx942 count=wavefront_size | |
#include "hip.cuh"
#ifndef BYTES
#define BYTES 0
#endif
#ifdef CU
#define MODE __attribute__((target("cumode")))
#else
#define MODE
#endif

extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(256, 256))) MODE void micro(float *out, const float *data,
                                                                                           int step) {
#if BYTES
  __shared__ float own[BYTES / 4];
  for (unsigned i = threadIdx.x; i < BYTES / 4; i += 256) own[i] = data[i];
  __syncthreads();
  out[threadIdx.x + 4096] = own[(threadIdx.x * 77) % (BYTES / 4)];
#endif
  float x[LIVE];
  for (int i = 0; i < LIVE; ++i) x[i] = data[threadIdx.x + i * step];
  __syncthreads();
  for (int round = 0; round < step; ++round) {
#pragma unroll
    for (int i = 0; i < LIVE; ++i) x[i] = x[i] * x[(i + 1) % LIVE] + float(round);
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < LIVE; ++i) sum = sum * 3 + x[i];
  out[threadIdx.x] = sum;
}
