// SiLU 1. Two ops: σ(x) is written to memory, read again, and multiplied.
//
// Idea      What a framework does with x * sigmoid(x): two launches, whose middle result goes through memory (and is rounded
//           there).
// Bytes     SiLU: 10 a number in place of 4. SiLU times another matrix: 16 in place of 6, in three launches.
// Limit     Memory, for bytes that one op would not move.
// Next      One op.
#include "rows.cuh"

constexpr int THREADS = 256;

// y = a if it is alone, and is then σ(a); or y = a · b. n numbers: rows of `width`, whose starts are a_pitch apart in a,
// b_pitch in b, and `width` in y.
extern "C" __global__ void __launch_bounds__(THREADS)
silu(const Element *a, const Element *b, Element *y, size_t n, int width, int a_pitch, int b_pitch) {
  size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x;
  if (i >= n) return;
  size_t row = i / width, column = i % width;
  float x = to_float(a[row * a_pitch + column]);
  round_to(y[i], b ? x * to_float(b[row * b_pitch + column]) : sigmoid(x));
}
