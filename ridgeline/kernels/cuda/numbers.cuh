// The number formats of rungs, on a GPU and in the emulator. -DELEMENT=fp16 replaces the operands' format, bf16, and
// -DOUTPUT=float the results', which is the operands' otherwise.
#pragma once
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#else
#include "emulator.cuh"
#endif

typedef __nv_bfloat16 bf16;
typedef __half fp16;
typedef __nv_fp8_e4m3 e4m3;
typedef signed char int8;

#ifndef ELEMENT
#define ELEMENT bf16
#endif
#ifndef OUTPUT
#define OUTPUT ELEMENT
#endif
typedef ELEMENT Element;
typedef OUTPUT Output;

__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(fp16 x) { return __half2float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ void round_to(bf16 &y, float x) { y = __float2bfloat16(x); }
__device__ __forceinline__ void round_to(fp16 &y, float x) { y = __float2half(x); }
__device__ __forceinline__ void round_to(float &y, float x) { y = x; }
__device__ __forceinline__ void round_to(int &y, int x) { y = x; }
__device__ __forceinline__ void round_to(int8 &y, int x) { y = x < -128 ? -128 : x > 127 ? 127 : x; }
__device__ __forceinline__ void round_to(e4m3 &y, float x) { y = e4m3(x); }

// 16, 8 and 4 bytes of memory, as elements.
struct __align__(16) Vector {
  Element at[8];
};
struct __align__(8) Half {
  Element at[4];
};
struct __align__(4) Pair {
  Element at[2];
};
