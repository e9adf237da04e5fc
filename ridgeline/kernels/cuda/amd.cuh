// Matrix instructions of AMD GPUs, each a small function with two bodies: clang's builtin, and in the emulator the
// fragments that AMD's matrix instruction calculator prints (github.com/ROCm/amd_matrix_instruction_calculator, CDNA3
// and RDNA3; the same is in the ISA documents of MI300 and RDNA 3).
#pragma once
#include "hip.cuh"

template <int N> struct Sums { float at[N]; };

__device__ __forceinline__ int lane_of_wave() { return threadIdx.x % WAVE; }

// ---- LDS by 16 bytes a lane: eight lanes take one cycle, and the emulator counts those that meet in a bank. ----------
// Which eight lanes of a load go together on CDNA3 is in Composable Kernel's page on bank conflicts: 0 to 3 with 20 to
// 23, 4 to 7 with 16 to 19, and so on; of a store they are neighbours. For RDNA 3 neighbours are assumed.

#ifndef __HIP__
namespace emulator {
inline unsigned lds_lane(unsigned i) {
  unsigned group = i / 8 % 4, at = i % 8;
  return i / 32 * 32 + (at < 4 ? 4 * group + at : 16 + (4 * group ^ 4) + at - 4);
}
}  // namespace emulator
#endif

__device__ __forceinline__ Vector load_lds(const Element *from) {
#ifndef __HIP__
  emulator::count_banks(from, 16, WAVE == 64 ? emulator::lds_lane : nullptr);
#endif
  return *reinterpret_cast<const Vector *>(from);
}

__device__ __forceinline__ void store_lds(Element *to, const Vector &vector) {
#ifndef __HIP__
  emulator::count_banks(to, 16);
#endif
  *reinterpret_cast<Vector *>(to) = vector;
}

struct Halves { Half at[2]; };  // the operands of two products

__device__ __forceinline__ Halves load_halves(const Element *from) { return __builtin_bit_cast(Halves, load_lds(from)); }

// ---- MFMA (gfx942, waves of 64): d[S, S] += a[S, K] · b[K, S] with S = 32, K = 8 or S = K = 16 -----------------------
// Lane l has the numbers 4 (l / S) + e of K, e = 0 to 3, of row l % S of a and of column l % S of b. Its sum v is in
// row 4 (64 / S) (v / 4) + 4 (l / S) + v % 4 and column l % S.

#ifndef __HIP__
namespace emulator {
struct Fragments { float *d; const Element *a, *b; };

template <int S> void run_mfma(Warp &warp) {
  constexpr int K = 256 / S;
  float a[S][K], b[K][S];
  require(warp.size == 64, "MFMA is for waves of 64 lanes");
  for (int lane = 0; lane < 64; ++lane)
    for (int e = 0; e < 4; ++e) {
      const Fragments &own = *static_cast<Fragments *>(warp.slots[lane]);
      a[lane % S][4 * (lane / S) + e] = to_float(own.a[e]);
      b[4 * (lane / S) + e][lane % S] = to_float(own.b[e]);
    }
  for (int lane = 0; lane < 64; ++lane)
    for (int v = 0; v < S * S / 64; ++v) {
      int row = 4 * (64 / S) * (v / 4) + 4 * (lane / S) + v % 4;
      float sum = 0;
      for (int k = 0; k < K; ++k) sum += a[row][k] * b[k][lane % S];
      static_cast<Fragments *>(warp.slots[lane])->d[v] += sum;
    }
}

// WMMA: both halves of the wave bring the same rows of a and columns of b.
inline void run_rdna_wmma(Warp &warp) {
  float a[16][16], b[16][16];
  require(warp.size == 32, "this WMMA is for waves of 32 lanes");
  for (int lane = 0; lane < 32; ++lane)
    for (int k = 0; k < 16; ++k) {
      const Fragments &own = *static_cast<Fragments *>(warp.slots[lane]);
      const Fragments &twin = *static_cast<Fragments *>(warp.slots[lane ^ 16]);
      require(own.a[k].bits == twin.a[k].bits && own.b[k].bits == twin.b[k].bits,
              "lanes l and l + 16 give WMMA different operands");
      a[lane % 16][k] = to_float(own.a[k]);
      b[k][lane % 16] = to_float(own.b[k]);
    }
  for (int lane = 0; lane < 32; ++lane)
    for (int v = 0; v < 8; ++v) {
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += a[2 * v + lane / 16][k] * b[k][lane % 16];
      static_cast<Fragments *>(warp.slots[lane])->d[v] += sum;
    }
}
}  // namespace emulator
#else
typedef short Four __attribute__((ext_vector_type(4)));
typedef short Sixteen __attribute__((ext_vector_type(16)));
typedef float Floats4 __attribute__((ext_vector_type(4)));
typedef float Floats8 __attribute__((ext_vector_type(8)));
typedef float Floats16 __attribute__((ext_vector_type(16)));
#endif

template <int S> __device__ __forceinline__ void mfma(Sums<S * S / 64> &d, const Half &a, const Half &b) {
#ifndef __HIP__
  emulator::Fragments own{d.at, a.at, b.at};
  emulator::together("mfma", &own, emulator::run_mfma<S>);
#elif defined(__GFX9__)
  Four a4 = __builtin_bit_cast(Four, a), b4 = __builtin_bit_cast(Four, b);
  if constexpr (S == 32)
    d = __builtin_bit_cast(Sums<16>, __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(a4, b4, __builtin_bit_cast(Floats16, d),
                                                                              0, 0, 0));
  else
    d = __builtin_bit_cast(Sums<4>, __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a4, b4, __builtin_bit_cast(Floats4, d),
                                                                             0, 0, 0));
#endif
}

// ---- WMMA (gfx1100, waves of 32): d[16, 16] += a[16, 16] · b[16, 16] --------------------------------------------------
// Lanes l and l + 16 both have all of row l of a, and of column l of b. Lane l's sum v is in row 2 v + l / 16 and column
// l % 16.

struct Row { Vector half[2]; };  // 16 numbers of K

__device__ __forceinline__ void wmma_16(Sums<8> &d, const Row &a, const Row &b) {
#ifndef __HIP__
  emulator::Fragments own{d.at, a.half[0].at, b.half[0].at};
  emulator::together("wmma", &own, emulator::run_rdna_wmma);
#elif !defined(__GFX9__)
  d = __builtin_bit_cast(Sums<8>, __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(
                                      __builtin_bit_cast(Sixteen, a), __builtin_bit_cast(Sixteen, b),
                                      __builtin_bit_cast(Floats8, d)));
#endif
}
