// Norms 2. Welford: mean and squared distances in one pass.
//
// Idea      A number that comes moves the mean by its share, and the squares grow by the two distances (Welford 1962). Two such
//           statistics merge (Chan, Golub and LeVeque 1979), so threads meet by the same tree. It is as exact as two passes,
//           where the mean of squares minus the square of the mean is not.
// Bytes     As rung 1; each number comes from L1 or L2 twice.
// Limit     Waiting, and a chain: each number's update needs the one before, and a division.
// Next      The row in registers, where two passes cost no memory.
#include "rows.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
norms(const Element *x, const Element *weight, const Element *bias, Element *y, int rows, int columns, float epsilon) {
  __shared__ Moments slots[THREADS];
  x += (size_t)blockIdx.x * columns;
  y += (size_t)blockIdx.x * columns;
  Moments all = Moments::none();
  for (int i = threadIdx.x; i < columns; i += THREADS) {
    float number = to_float(x[i]), apart = number - all.mean;
    all.count += 1;
    all.mean += apart * inverse(all.count);
    all.squares += apart * (number - all.mean);
  }
  all = by_tree(all, slots);
  float scale = inverse_root(all.squares / columns + epsilon);
  for (int i = threadIdx.x; i < columns; i += THREADS)
    round_to(y[i], (to_float(x[i]) - all.mean) * scale * to_float(weight[i]) + to_float(bias[i]));
}
