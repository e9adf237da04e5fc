// Norms 3. Warp shuffles: the row stays in registers.
//
// Idea      A thread loads VECTORS times 16 bytes of the row at once and keeps them, so memory is read once, and mean and
//           distances are passes over registers. Lanes merge by shuffles, warps behind one barrier for each of the two sums. A
//           row of up to 1,024 numbers is one warp's, and a block has four of these.
// Bytes     4 a number, and weight and bias from L1 or L2 for each row: as many again for LayerNorm.
// Limit     A block loads, then computes, then stores: others must fill the pauses. Weight and bias of long rows do not fit L1.
// Next      Rows that come while others are worked on.
#include "rows.cuh"

#ifndef RMS
#define RMS 0
#endif

extern "C" __global__ void __launch_bounds__(1024)
norms(const Element *x, const Element *weight, const Element *bias, Element *y, int rows, int columns, float epsilon) {
  __shared__ Sum slots[2][32];
  int row = blockIdx.x * blockDim.y + threadIdx.y, width = columns / 8;
  if (row >= rows) return;  // of a whole warp, and then no barrier follows
  Vector own[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    int at = vector_at<VECTORS>(v, 0);
    own[v] = {};
    if (at < width) own[v] = *reinterpret_cast<const Vector *>(x + (size_t)row * columns + at * 8);
  }
  Sum sum = Sum::none(), squares = Sum::none();
  if (!RMS) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
#pragma unroll
      for (int i = 0; i < 8; ++i) sum.value += to_float(own[v].at[i]);
    sum = over_block(sum, slots[0]);
  }
  float mean = sum.value / columns;
  stay_narrow(own);
#pragma unroll
  for (int v = 0; v < VECTORS; ++v)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float apart = vector_at<VECTORS>(v, 0) < width ? to_float(own[v].at[i]) - mean : 0;
      squares.value += apart * apart;
    }
  float scale = inverse_root(over_block(squares, slots[1]).value / columns + epsilon);
  stay_narrow(own);
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    int at = vector_at<VECTORS>(v, 0);
    if (at >= width) continue;
    Vector by = reinterpret_cast<const Vector *>(weight)[at], plus = {};
    if (!RMS) plus = reinterpret_cast<const Vector *>(bias)[at];
    *reinterpret_cast<Vector *>(y + (size_t)row * columns + at * 8) = each_number(own[v], [&](float z, int i) {
      return (z - mean) * scale * to_float(by.at[i]) + (RMS ? 0 : to_float(plus.at[i]));
    });
  }
}
