// Vector add 2. Vectors: 16 bytes a load, and several loads before the first is needed.
//
// Idea      One instruction moves 16 bytes, and a thread starts all its loads before it adds. So it has OWN times 32 bytes
//           under way, and the grid has a sixteenth of the threads.
// Bytes     12 a number.
// Limit     Memory.
#include "numbers.cuh"

constexpr int THREADS = 256, OWN = 4;

extern "C" __global__ void __launch_bounds__(THREADS)
vector_add(const float *a, const float *b, float *c, size_t n) {
  size_t first = blockIdx.x * (size_t)(THREADS * OWN) + threadIdx.x, whole = n / 4;
  float4 x[OWN], y[OWN];
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    size_t at = first + i * THREADS;
    if (at >= whole) continue;
    x[i] = reinterpret_cast<const float4 *>(a)[at];
    y[i] = reinterpret_cast<const float4 *>(b)[at];
  }
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    size_t at = first + i * THREADS;
    if (at >= whole) continue;
    reinterpret_cast<float4 *>(c)[at] = make_float4(x[i].x + y[i].x, x[i].y + y[i].y, x[i].z + y[i].z, x[i].w + y[i].w);
  }
  if (blockIdx.x == 0 && threadIdx.x < n % 4) {
    size_t at = whole * 4 + threadIdx.x;
    c[at] = a[at] + b[at];
  }
}
