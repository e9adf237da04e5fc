// SiLU 3. Vectors: 16 bytes a load, several before the first is needed.
//
// Idea      As the vector add: eight numbers an instruction, and OWN rows of these under way. The grid is of rows and columns, so
//           no thread divides by the width. σ is ex2 and rcp, two instructions of the units that do 16 a cycle.
// Bytes     4 a number, or 6.
// Limit     Memory: 2 slow instructions a number are 0.125 cycles of a multiprocessor, half of the time of its bytes.
#include "rows.cuh"

#ifndef GATED
#define GATED 0
#endif
constexpr int THREADS = 256, OWN = GATED ? 2 : 4;

extern "C" __global__ void __launch_bounds__(THREADS)
silu(const Element *a, const Element *b, Element *y, size_t n, int width, int a_pitch, int b_pitch) {
  int at = (blockIdx.y * THREADS + threadIdx.x) * 8, first = blockIdx.x * OWN, rows = n / width;
  if (at >= width) return;
  Vector x[OWN], other[OWN];
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    if (first + i >= rows) continue;
    x[i] = load_once(a + (size_t)(first + i) * a_pitch + at);
    if (GATED) other[i] = load_once(b + (size_t)(first + i) * b_pitch + at);
  }
#pragma unroll
  for (int i = 0; i < OWN; ++i)
    if (first + i < rows)
      *reinterpret_cast<Vector *>(y + (size_t)(first + i) * width + at) =
          each_number(x[i], [&](float v, int j) { return v * sigmoid(v) * (GATED ? to_float(other[i].at[j]) : 1); });
}
