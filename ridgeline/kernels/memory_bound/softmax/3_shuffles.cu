// Softmax 3. Warp shuffles: the row stays in registers.
//
// Idea      A thread loads VECTORS times 16 bytes of the row at once and keeps them, so memory is read once, and the largest and
//           the sum are passes over registers. Lanes merge by shuffles, warps behind one barrier. A row of up to 1,024 numbers
//           is one warp's, and a block has four of these.
// Bytes     4 a number.
// Limit     A block loads, then computes, then stores: others must fill the pauses, and a row of 64 K numbers takes all the
//           registers of a multiprocessor. There is no other then.
// Next      Rows that several blocks share.
#include "rows.cuh"

extern "C" __global__ void __launch_bounds__(1024) softmax(const Element *x, Element *y, int rows, int columns) {
  __shared__ Exponentials slots[32];
  int row = blockIdx.x * blockDim.y + threadIdx.y, width = columns / 8;
  if (row >= rows) return;  // of a whole warp, and then no barrier follows
  Vector own[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    int at = vector_at<VECTORS>(v, 0);
    if (at < width) own[v] = *reinterpret_cast<const Vector *>(x + (size_t)row * columns + at * 8);
  }
  Exponentials all = Exponentials::none();
#pragma unroll
  for (int v = 0; v < VECTORS; ++v)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (vector_at<VECTORS>(v, 0) < width) all.largest = fmaxf(all.largest, to_float(own[v].at[i]) * LOG2_E);
  stay_narrow(own);
#pragma unroll
  for (int v = 0; v < VECTORS; ++v)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (vector_at<VECTORS>(v, 0) < width) all.sum += power_of_2(to_float(own[v].at[i]) * LOG2_E - all.largest);
  all = over_block(all, slots);
  stay_narrow(own);
  float part = inverse(all.sum);
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    int at = vector_at<VECTORS>(v, 0);
    if (at < width)
      *reinterpret_cast<Vector *>(y + (size_t)row * columns + at * 8) =
          each_number(own[v], [&](float z, int) { return power_of_2(z * LOG2_E - all.largest) * part; });
  }
}
