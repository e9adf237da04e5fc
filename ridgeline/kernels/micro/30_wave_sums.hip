// What does a sum over all lanes of a wave take on AMD's GPUs, and what do 64 lanes change?
//
// Hypothesis: a shuffle is `ds_bpermute_b32`, an instruction of LDS: five of them for 32 lanes, six for 64. DPP instead
// moves operands within rows of 16 lanes as a part of the addition: four additions and no instruction of LDS. Between
// rows gfx942 has broadcasts, which are DPP again, and gfx1100 has `v_permlanex16_b32`.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | gfx1100, shuffles: instructions of LDS | 5 | instructions | WAY=0 arch=gfx1100 count=ds_bpermute_b32 | |
// | gfx942, shuffles: instructions of LDS | 6 | instructions | WAY=0 arch=gfx942 count=ds_bpermute_b32 | |
// | gfx1100, DPP: instructions of LDS | 0 | instructions | WAY=1 arch=gfx1100 count=ds_bpermute_b32 | |
// | gfx1100, DPP: additions that move operands | 4 | instructions | WAY=1 arch=gfx1100 count=v_add_f32_dpp | |
// | gfx1100, DPP: exchanges of rows | 1 | instructions | WAY=1 arch=gfx1100 count=v_permlanex16_b32 | |
// | gfx942, DPP: additions that move operands | 6 | instructions | WAY=1 arch=gfx942 count=v_add_f32_dpp | |
#include "hip.cuh"

template <int CONTROL> __device__ __forceinline__ float moved(float x) {
  return __builtin_bit_cast(
      float, __builtin_amdgcn_update_dpp(0, __builtin_bit_cast(int, x), CONTROL, 0xf, 0xf, true));
}

constexpr int ROTATE = 0x120, BROADCAST_15 = 0x142, BROADCAST_31 = 0x143;  // of DPP, within a row or from its last lane

__device__ __forceinline__ float sum_of_wave(float x) {
#if WAY == 0
  for (int mask = WAVE / 2; mask; mask /= 2) x += __shfl_xor(x, mask);
#else
  x += moved<ROTATE + 8>(x);
  x += moved<ROTATE + 4>(x);
  x += moved<ROTATE + 2>(x);
  x += moved<ROTATE + 1>(x);
#ifdef __GFX9__
  x += moved<BROADCAST_15>(x);
  x += moved<BROADCAST_31>(x);  // the last lane has the sum
#else
  int other = __builtin_bit_cast(int, x);
  x += __builtin_bit_cast(float, __builtin_amdgcn_permlanex16(other, other, 0x76543210, 0xfedcba98, false, false));
#endif
#endif
  return x;
}

extern "C" __global__ void micro(float *out, const float *data) {
  out[threadIdx.x] = sum_of_wave(data[threadIdx.x]);
}
