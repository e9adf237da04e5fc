// The ceiling of rung 8: WMMA with all operands in registers. Nothing is loaded, and eight products of a warp do not
// depend on each other, so that its rate is the most that WMMA gives in this shape and format. Rung 8 should reach 80 %
// of it. Each thread stores the sum of its elements, which is 8 · elements · rounds · K · x · y.
#include "ptx.cuh"
#include "wmma.cuh"

#define SHAPE SHAPE_M, SHAPE_N, SHAPE_K
namespace wmma = nvcuda::wmma;

constexpr int CHAINS = 8, THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) ceiling(SUM *out, int rounds, int x, int y) {
  wmma::fragment<wmma::matrix_a, SHAPE, FRAGMENT, wmma::row_major> a;
  wmma::fragment<wmma::matrix_b, SHAPE, FRAGMENT, wmma::col_major> b;
  wmma::fragment<wmma::accumulator, SHAPE, SUM> sum[CHAINS];
  Element left, right;
  round_to(left, x);
  round_to(right, y);
  wmma::fill_fragment(a, left);
  wmma::fill_fragment(b, right);
#pragma unroll
  for (int i = 0; i < CHAINS; ++i) wmma::fill_fragment(sum[i], SUM(0));
#pragma unroll 1
  for (int round = 0; round < rounds; ++round)
#pragma unroll
    for (int i = 0; i < CHAINS; ++i) wmma::mma_sync(sum[i], a, b, sum[i]);
  SUM all = 0;
#pragma unroll
  for (int i = 0; i < CHAINS; ++i)
#pragma unroll
    for (int at = 0; at < sum[i].num_elements; ++at) all += sum[i].x[at];
  out[blockIdx.x * THREADS + threadIdx.x] = all;
}
