// Which registers do the fragments of AMD's matrix instructions take, and does one instruction do a whole product?
//
// Hypothesis: MFMA of 32 x 32 x 8 has 16 sums in a lane and two registers for each operand, that of 16 x 16 x 16 four sums.
// WMMA of gfx1100 has eight sums in a lane, but eight registers for each operand, since both halves of a wave bring the
// same 16 numbers. Each product of the kernel is one instruction, and sums of one accumulator are never moved between
// ordinary registers and those for sums (AGPRs): there are enough ordinary ones.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | gfx942, 32 x 32 x 8: products | 4 | instructions | SIZE=32 arch=gfx942 count=v_mfma_f32_32x32x8_bf16 | |
// | gfx942, 16 x 16 x 16: products | 4 | instructions | SIZE=16 arch=gfx942 count=v_mfma_f32_16x16x16_bf16 | |
// | gfx942, 32 x 32 x 8: moves from AGPRs | 0 | instructions | SIZE=32 arch=gfx942 count=v_accvgpr_read_b32 | |
// | gfx1100, 16 x 16 x 16: products | 4 | instructions | SIZE=0 arch=gfx1100 count=v_wmma_f32_16x16x16_bf16 | |
// | gfx942, 32 x 32 x 8: registers | 28 | registers | SIZE=32 arch=gfx942 count=vgpr_count | |
// | gfx1100, 16 x 16 x 16: registers | 44 | registers | SIZE=0 arch=gfx1100 count=vgpr_count | |
#include "amd.cuh"

// Four products one after the other into one accumulator.
extern "C" __global__ void micro(float *out, const Element *a, const Element *b) {
  int lane = lane_of_wave();
#if SIZE
  Sums<SIZE * SIZE / 64> d = {};
  for (int i = 0; i < 4; ++i)
    mfma<SIZE>(d, reinterpret_cast<const Half *>(a)[lane + 64 * i], reinterpret_cast<const Half *>(b)[lane + 64 * i]);
  constexpr int NUMBERS = SIZE * SIZE / 64;
#else
  Sums<8> d = {};
  for (int i = 0; i < 4; ++i)
    wmma_16(d, reinterpret_cast<const Row *>(a)[lane + 32 * i], reinterpret_cast<const Row *>(b)[lane + 32 * i]);
  constexpr int NUMBERS = 8;
#endif
#pragma unroll
  for (int i = 0; i < NUMBERS; ++i) out[lane + WAVE * i] = d.at[i];
}
