// SiLU 3. Vectors: 16 bytes a load, several before the first is needed.
//
// Idea      As the vector add: eight numbers an instruction, OWN of these under way. σ is ex2 and rcp, two instructions of the
//           units that do 16 a cycle.
// Bytes     4 a number, or 6.
// Limit     Memory: 2 of 16 slow instructions a number are 0.125 cycles of a multiprocessor, a third of the time of its bytes.
#include "rows.cuh"

#ifndef GATED
#define GATED 0
#endif
constexpr int THREADS = 256, OWN = 4;

extern "C" __global__ void __launch_bounds__(THREADS)
silu(const Element *a, const Element *b, Element *y, size_t n, int width, int a_pitch, int b_pitch) {
  unsigned count = n / 8, pieces = width / 8, first = blockIdx.x * (THREADS * OWN) + threadIdx.x;
  Vector x[OWN], other[OWN];
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    unsigned at = first + i * THREADS, row = at / pieces, column = at % pieces;
    if (at >= count) continue;
    x[i] = *reinterpret_cast<const Vector *>(a + (size_t)row * a_pitch + column * 8);
    if (GATED) other[i] = *reinterpret_cast<const Vector *>(b + (size_t)row * b_pitch + column * 8);
  }
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    unsigned at = first + i * THREADS;
    if (at >= count) continue;
    reinterpret_cast<Vector *>(y)[at] =
        each_number(x[i], [&](float v, int j) { return v * sigmoid(v) * (GATED ? to_float(other[i].at[j]) : 1); });
  }
}
