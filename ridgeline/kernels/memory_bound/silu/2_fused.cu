// SiLU 2. Fused: one op, a number a thread.
//
// Idea      σ(x) stays in a register.
// Bytes     4 a number; 6 with another matrix, which lies behind the first in each row, as engines have gate and up.
// Limit     Bytes on their way: a thread has 2 or 4, and there is a division by the width for each number.
// Next      Vectors.
#include "rows.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
silu(const Element *a, const Element *b, Element *y, size_t n, int width, int a_pitch, int b_pitch) {
  size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x;
  if (i >= n) return;
  size_t row = i / width, column = i % width;
  float x = to_float(a[row * a_pitch + column]);
  round_to(y[i], x * sigmoid(x) * (b ? to_float(b[row * b_pitch + column]) : 1));
}
