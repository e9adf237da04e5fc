// Which instructions of LDS do eight neighbouring numbers of a lane become?
//
// Hypothesis: where the compiler knows that they begin at 16 bytes, two loads of 16 bytes each, on both GPUs. Where it
// does not, four loads of two words, since a load of 16 bytes needs its alignment. LDS gives 128 bytes a cycle: eight
// numbers of 64 lanes take 16 cycles either way, but twice as many instructions.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | gfx942, aligned: loads of 16 bytes | 2 | instructions | ALIGNED=1 arch=gfx942 count=ds_read_b128 | |
// | gfx1100, aligned: loads of 16 bytes | 2 | instructions | ALIGNED=1 arch=gfx1100 count=ds_load_b128 | |
// | gfx942, any place: loads of two words | 4 | instructions | ALIGNED=0 arch=gfx942 count=ds_read2_b32 | |
// | gfx1100, any place: loads of two words | 4 | instructions | ALIGNED=0 arch=gfx1100 count=ds_load_2addr_b32 | |
#include "hip.cuh"

extern "C" __global__ void micro(float *out, const float *data, int shift) {
  __shared__ __align__(16) float own[1024];
  own[threadIdx.x] = data[threadIdx.x];
  __syncthreads();
  const float *from = own + (ALIGNED ? threadIdx.x * 8 : threadIdx.x * 8 + shift);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += from[i] * from[7 - i];
  out[threadIdx.x] = sum;
}
