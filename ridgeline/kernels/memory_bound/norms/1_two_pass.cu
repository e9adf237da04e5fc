// Norms 1. Two passes for the statistics: the mean, then the distances from it; and a third for the output.
//
// Idea      As the formula says, a block a row. -DRMS leaves out the mean and the bias: RMSNorm.
// Bytes     4 a number if the row is still in a cache, as it is here; each number comes from L1 or L2 three times (RMS: twice).
// Limit     Waiting: a thread has one number of 2 bytes under way, and stands still in 20 barriers a row.
// Next      Both moments in one pass.
#include "rows.cuh"

#ifndef RMS
#define RMS 0
#endif
constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
norms(const Element *x, const Element *weight, const Element *bias, Element *y, int rows, int columns, float epsilon) {
  __shared__ Sum slots[THREADS];
  x += (size_t)blockIdx.x * columns;
  y += (size_t)blockIdx.x * columns;
  Sum sum = Sum::none(), squares = Sum::none();
  if (!RMS) {
    for (int i = threadIdx.x; i < columns; i += THREADS) sum = sum.with({to_float(x[i])});
    sum = by_tree(sum, slots);
  }
  float mean = sum.value / columns;
  for (int i = threadIdx.x; i < columns; i += THREADS) {
    float apart = to_float(x[i]) - mean;
    squares = squares.with({apart * apart});
  }
  float scale = inverse_root(by_tree(squares, slots).value / columns + epsilon);
  for (int i = threadIdx.x; i < columns; i += THREADS)
    round_to(y[i], (to_float(x[i]) - mean) * scale * to_float(weight[i]) + (RMS ? 0 : to_float(bias[i])));
}
