// Softmax 2. Online: the largest and the sum in one pass.
//
// Idea      A sum over the largest number so far is right again after one multiplication when a larger one comes (Milakov and
//           Gimelshein, arXiv 1805.02867). So two passes are enough, and two such sums merge.
// Bytes     As rung 1; each number comes from L1 or L2 twice.
// Limit     Waiting, as in rung 1, and two exponentials a number.
// Next      The row in registers.
#include "rows.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) softmax(const Element *x, Element *y, int rows, int columns) {
  __shared__ Exponentials slots[THREADS];
  x += (size_t)blockIdx.x * columns;
  y += (size_t)blockIdx.x * columns;
  Exponentials all = Exponentials::none();
  for (int i = threadIdx.x; i < columns; i += THREADS) all = all.with({to_float(x[i]) * LOG2_E, 1});
  all = by_tree(all, slots);
  float part = inverse(all.sum);
  for (int i = threadIdx.x; i < columns; i += THREADS)
    round_to(y[i], power_of_2(to_float(x[i]) * LOG2_E - all.largest) * part);
}
