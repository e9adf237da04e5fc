// The number formats of rungs, on a GPU and in the emulator. -DELEMENT=fp16 replaces the operands' format, bf16.
#pragma once
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include "emulator.cuh"
#endif

typedef __nv_bfloat16 bf16;
typedef __half fp16;

#ifndef ELEMENT
#define ELEMENT bf16
#endif
typedef ELEMENT Element;

__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(fp16 x) { return __half2float(x); }
__device__ __forceinline__ void round_to(bf16 &y, float x) { y = __float2bfloat16(x); }
__device__ __forceinline__ void round_to(fp16 &y, float x) { y = __float2half(x); }

// 16 and 8 bytes of memory, as elements.
struct __align__(16) Vector {
  Element at[8];
};
struct __align__(8) Half {
  Element at[4];
};
