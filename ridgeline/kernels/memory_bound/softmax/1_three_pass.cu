// Softmax 1. Three passes: the largest, the sum, the output.
//
// Idea      As the formula says: a block reads its row for the largest number, again for the sum of exponentials, and again for
//           the output. Threads meet by a tree in shared memory.
// Bytes     4 a number if the row is still in a cache at the second and third time, as it is here; each number comes from L1
//           or L2 three times.
// Limit     Waiting: a thread has one number of 2 bytes under way, and stands still in 20 barriers a row.
// Next      Largest and sum in one pass.
#include "rows.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) softmax(const Element *x, Element *y, int rows, int columns) {
  __shared__ Largest tops[THREADS];
  __shared__ Sum sums[THREADS];
  x += (size_t)blockIdx.x * columns;
  y += (size_t)blockIdx.x * columns;
  Largest top = Largest::none();
  for (int i = threadIdx.x; i < columns; i += THREADS) top = top.with({to_float(x[i])});
  float base = by_tree(top, tops).value * LOG2_E;
  Sum sum = Sum::none();
  for (int i = threadIdx.x; i < columns; i += THREADS) sum = sum.with({power_of_2(to_float(x[i]) * LOG2_E - base)});
  float part = inverse(by_tree(sum, sums).value);
  for (int i = threadIdx.x; i < columns; i += THREADS) round_to(y[i], power_of_2(to_float(x[i]) * LOG2_E - base) * part);
}
