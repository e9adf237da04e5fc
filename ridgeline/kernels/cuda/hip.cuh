// What HIP has for the words of rungs, without ROCm's headers: clang's builtins for AMD GPUs. In the emulator, where no
// AMD GPU is meant either, the same words are its own.
#pragma once
#ifndef __HIP__
#include "ptx.cuh"

constexpr int WAVE = WARP_LANES;
__device__ __forceinline__ float __shfl_xor(float value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
#else

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(n) __attribute__((amdgpu_flat_work_group_size(1, n)))

typedef __SIZE_TYPE__ size_t;
struct __align__(16) float4 { float x, y, z, w; };
struct Index { unsigned x, y, z; };
__device__ __forceinline__ Index thread_index() {
  return {__builtin_amdgcn_workitem_id_x(), __builtin_amdgcn_workitem_id_y(), __builtin_amdgcn_workitem_id_z()};
}
__device__ __forceinline__ Index block_index() {
  return {__builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y(), __builtin_amdgcn_workgroup_id_z()};
}
__device__ __forceinline__ Index block_size() {
  return {__builtin_amdgcn_workgroup_size_x(), __builtin_amdgcn_workgroup_size_y(), __builtin_amdgcn_workgroup_size_z()};
}
#define threadIdx thread_index()
#define blockIdx block_index()
#define blockDim block_size()

#ifdef __GFX9__
constexpr int WAVE = 64;
#else
constexpr int WAVE = 32;
#endif

__device__ __forceinline__ void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
__device__ __forceinline__ float __shfl_xor(float value, int mask) {
  int lane = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
  return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute((lane ^ mask) * 4, __builtin_bit_cast(int, value)));
}

struct Element { unsigned short bits; };  // bfloat16
__device__ __forceinline__ float to_float(Element x) { return __builtin_bit_cast(float, (unsigned)x.bits << 16); }
__device__ __forceinline__ void round_to(Element &y, float x) {  // to the nearest, ties to even
  unsigned u = __builtin_bit_cast(unsigned, x);
  y.bits = x != x ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
struct __align__(16) Vector { Element at[8]; };
struct __align__(8) Half { Element at[4]; };
struct __align__(4) Pair { Element at[2]; };

__device__ __forceinline__ float4 load_shared(const float *from) { return *reinterpret_cast<const float4 *>(from); }
__device__ __forceinline__ void store_shared(float *to, float value) { *to = value; }
#endif
