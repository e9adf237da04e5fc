// Products of 4-bit numbers with a scale for each 16 of them (sm_120a): NVFP4. A number is E2M1 (0, 0.5, 1, 1.5, 2, 3, 4,
// 6 and the same below zero), a scale E4M3 without its sign. Two numbers are a byte, the first in its lower half.
#pragma once
#include "ptx.cuh"

#ifndef __CUDACC__
namespace emulator {
inline float fp4_value(unsigned code) {  // one bit of mantissa, two of exponent
  unsigned exponent = code >> 1 & 3, mantissa = code & 1;
  float size = exponent ? std::ldexp(1.f + mantissa / 2.f, int(exponent) - 1) : mantissa / 2.f;
  return code & 8 ? -size : size;
}
inline float scale_value(unsigned code) {
  require(code < 0x7f, "a scale that is negative or no number");
  __nv_fp8_e4m3 scale;
  scale.bits = uint8_t(code);
  return value_of(scale);
}

struct Fp4 { float *d; const uint32_t *a, *b; uint32_t a_scales, b_scales; };

// A register has eight numbers of K. Of a lane l the registers of a are rows l / 4 and l / 4 + 8, each for K from
// 8 (l % 4), then both for K from 32 further; those of b are column l / 4, for K from 8 (l % 4) and 32 further.
inline void run_fp4(Warp &warp) {
  float a[16][64], b[64][8];
  auto own = [&](int lane) -> const Fp4 & { return *static_cast<Fp4 *>(warp.slots[lane]); };
  for (int lane = 0; lane < 32; ++lane)
    for (int k = 0; k < 8; ++k)
      for (int high = 0; high < 2; ++high) {
        int at = lane % 4 * 8 + k + 32 * high, row = lane / 4;
        unsigned shift = 8 * (at / 16);  // of the byte that scales it; lane 4 g has row g's scales, 4 g + 1 row g + 8's
        for (int low = 0; low < 2; ++low)
          a[row + 8 * low][at] = fp4_value(own(lane).a[low + 2 * high] >> 4 * k & 15) *
                                 scale_value(own(row * 4 + low).a_scales >> shift & 255);
        b[at][row] = fp4_value(own(lane).b[high] >> 4 * k & 15) * scale_value(own(row * 4).b_scales >> shift & 255);
      }
  for (int lane = 0; lane < 32; ++lane)
    for (int at = 0; at < 4; ++at) {
      Place p = of_c(lane, at);
      float sum = 0;
      for (int k = 0; k < 64; ++k) sum += a[p.row][k] * b[k][p.column];
      static_cast<Fp4 *>(warp.slots[lane])->d[at] += sum;
    }
}
}  // namespace emulator
#endif

// d[16, 8] += a[16, 64] · b[64, 8] by a warp, each number times its scale. A register of scales has those of the four
// blocks of K, for row l / 4 + 8 (l % 2) of a where l % 4 < 2, and for column l / 4 of b where l % 4 = 0.
__device__ __forceinline__ void mma_fp4(float (&d)[4], const unsigned (&a)[4], const unsigned *b, unsigned a_scales,
                                        unsigned b_scales) {
#ifdef __CUDACC__
  asm volatile("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, 0}, {%11}, {0, 0};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(a_scales), "r"(b_scales));
#else
  emulator::Fp4 own{d, a, b, a_scales, b_scales};
  emulator::together("mma.m16n8k64", &own, emulator::run_fp4);
#endif
}
