// wgmma (sm_90a): four warps multiply from shared memory, while they do other things.
//
// Where a wait leaves a group running, ptxas must see that nothing touches the sums until they are there. Else it makes
// each wgmma of the kernel wait for the one before, and warns (C7514, C7515; compile.py makes an error of it). Two things
// hide it from ptxas, though they stand behind the last wait, or before the first product:
//
//   * a branch around a store of sums, which rows and columns that do not exist tempt to: store_if has none;
//   * sums that are set to zero: the first product writes them instead.
#pragma once
#include "ptx.cuh"

// An operand whose rows are 128 bytes of K, as TMA writes it; `from` is at a multiple of 1,024 bytes, or 32, 64 or 96
// bytes (one, two or three steps of K) further.
__device__ __forceinline__ unsigned long long operand(const void *from) {
  return (unsigned long long)((shared_address(from) & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// Store 4 bytes, where `stores`.
template <class T> __device__ __forceinline__ void store_if(bool stores, void *to, const T &value) {
  static_assert(sizeof(T) == 4, "others are not needed");
#ifdef __CUDACC__
  asm volatile("{\n.reg .pred stores;\nsetp.ne.b32 stores, %2, 0;\n@stores st.global.b32 [%0], %1;\n}" ::"l"(to),
               "r"(*reinterpret_cast<const unsigned *>(&value)), "r"((int)stores)
               : "memory");
#else
  if (stores) memcpy(to, &value, sizeof value);
#endif
}

// Make a float that is not negative at least `value`, where `stores`; such floats are in the order of their bits.
__device__ __forceinline__ void largest_if(bool stores, float *to, float value) {
#ifdef __CUDACC__
  asm volatile("{\n.reg .pred stores;\nsetp.ne.b32 stores, %2, 0;\n@stores red.global.max.s32 [%0], %1;\n}" ::"l"(to),
               "r"(__float_as_int(value)), "r"((int)stores)
               : "memory");
#else
  if (stores) *to = fmaxf(*to, value);
#endif
}

__device__ __forceinline__ void wgmma_fence() {
  PTX(asm volatile("wgmma.fence.sync.aligned;" ::: "memory"), emulator::current->fenced = true);
}

__device__ __forceinline__ void wgmma_commit() {
  PTX(asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"), ++emulator::current->group);
}

// Wait until at most N groups run. Sums may be touched when none does.
template <int N> __device__ __forceinline__ void wgmma_wait() {
#ifdef __CUDACC__
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#else
  emulator::wait_wgmma(N);
#endif
}

// d[64, N] += a[64, 32 bytes] · b[N, 32 bytes]ᵀ by a warpgroup, or without `adds` d = a · bᵀ. Lane l of warp w has, for
// i = 4 j + 2 h + e, row 16 w + l / 4 + 8 h and column 8 j + 2 (l % 4) + e in d[i].
#ifdef __CUDACC__
#define FOUR(KIND, i) KIND(d[i]), KIND(d[i + 1]), KIND(d[i + 2]), KIND(d[i + 3])
#define SIXTEEN(KIND, i) FOUR(KIND, i), FOUR(KIND, i + 4), FOUR(KIND, i + 8), FOUR(KIND, i + 12)
#define SUMS_64(KIND) SIXTEEN(KIND, 0), SIXTEEN(KIND, 16), SIXTEEN(KIND, 32), SIXTEEN(KIND, 48)
#define SUMS_128(KIND) SUMS_64(KIND), SIXTEEN(KIND, 64), SIXTEEN(KIND, 80), SIXTEEN(KIND, 96), SIXTEEN(KIND, 112)
#define NAMES_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_128 \
  NAMES_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA(WHAT, NAMES, SUMS, A, B, ADDS, SCALES)                                                                \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " ADDS ", 0;\nwgmma.mma_async.sync.aligned." WHAT " {" NAMES   \
               "}, " A ", " B ", adds" SCALES ";\n}"                                                                \
               : SUMS                                                                                               \
               : "l"(a), "l"(b), "r"((int)adds))
#define WGMMA_N128(WHAT) WGMMA(WHAT, NAMES_64, SUMS_64("+f"), "%64", "%65", "%66", ", 1, 1, 0, 0")
#define WGMMA_N256(WHAT, KIND, SCALES) WGMMA(WHAT, NAMES_128, SUMS_128(KIND), "%128", "%129", "%130", SCALES)
#endif

__device__ __forceinline__ void wgmma_m64n128k16(float (&d)[64], unsigned long long a, unsigned long long b,
                                                 bool adds) {
  PTX(WGMMA_N128("m64n128k16.f32.bf16.bf16"), emulator::add_wgmma<bf16>(d, 128, a, b, adds));
}

__device__ __forceinline__ void wgmma_m64n256k16(float (&d)[128], unsigned long long a, unsigned long long b,
                                                 bool adds) {
  PTX(WGMMA_N256("m64n256k16.f32.bf16.bf16", "+f", ", 1, 1, 0, 0"), emulator::add_wgmma<bf16>(d, 256, a, b, adds));
}
// The same in the format of the first argument; int8 has sums in int32, and of float32 the last 13 bits are not read
// (tf32).
template <class T> struct SumOf { typedef float type; };
template <> struct SumOf<int8> { typedef int type; };
typedef SumOf<Element>::type Sum;
__device__ __forceinline__ void wgmma_n256(bf16, float (&d)[128], unsigned long long a, unsigned long long b,
                                           bool adds) {
  wgmma_m64n256k16(d, a, b, adds);
}
__device__ __forceinline__ void wgmma_n256(fp16, float (&d)[128], unsigned long long a, unsigned long long b,
                                           bool adds) {
  PTX(WGMMA_N256("m64n256k16.f32.f16.f16", "+f", ", 1, 1, 0, 0"), emulator::add_wgmma<fp16>(d, 256, a, b, adds));
}
__device__ __forceinline__ void wgmma_n256(e4m3, float (&d)[128], unsigned long long a, unsigned long long b,
                                           bool adds) {
  PTX(WGMMA_N256("m64n256k32.f32.e4m3.e4m3", "+f", ", 1, 1"), emulator::add_wgmma<e4m3>(d, 256, a, b, adds));
}
__device__ __forceinline__ void wgmma_n256(float, float (&d)[128], unsigned long long a, unsigned long long b,
                                           bool adds) {
  PTX(WGMMA_N256("m64n256k8.f32.tf32.tf32", "+f", ", 1, 1"), emulator::add_wgmma<float>(d, 256, a, b, adds));
}
__device__ __forceinline__ void wgmma_n256(int8, int (&d)[128], unsigned long long a, unsigned long long b, bool adds) {
  PTX(WGMMA_N256("m64n256k32.s32.s8.s8", "+r", ""), emulator::add_wgmma<int8>(d, 256, a, b, adds));
}
