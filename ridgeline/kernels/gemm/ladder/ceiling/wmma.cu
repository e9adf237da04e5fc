// The ceiling of rung 8: its products with all operands in registers. A warp loads the fragments of 64 x K numbers of A
// and of B once, and multiplies them again and again, each pair into sums of its own, so that no product waits for the
// one before. The rate is the most that WMMA gives in this shape and format, for such numbers: a GPU that takes less
// power has a higher clock, so ones or zeros would run faster. Rung 8 should reach 80 % of it. Each thread stores the sum
// of its elements; those of a warp add up to `rounds` times the sum of all elements of A · Bᵀ.
#include "ptx.cuh"
#include "wmma.cuh"

#define SHAPE SHAPE_M, SHAPE_N, SHAPE_K
namespace wmma = nvcuda::wmma;

constexpr int WARP = 64, DOWN = WARP / SHAPE_M, ACROSS = WARP / SHAPE_N, THREADS = 256;

template <class Fragment> __device__ __forceinline__ void fill(Fragment &part, const Element *from) {
  wmma::load_matrix_sync(part, from, SHAPE_K);
#ifdef TF32
#pragma unroll
  for (int i = 0; i < part.num_elements; ++i) part.x[i] = wmma::__float_to_tf32(part.x[i]);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) ceiling(SUM *out, const Element *a, const Element *b, int rounds) {
  wmma::fragment<wmma::matrix_a, SHAPE, FRAGMENT, wmma::row_major> a_part[DOWN];
  wmma::fragment<wmma::matrix_b, SHAPE, FRAGMENT, wmma::col_major> b_part[ACROSS];
  wmma::fragment<wmma::accumulator, SHAPE, SUM> sum[DOWN][ACROSS];
#pragma unroll
  for (int i = 0; i < DOWN; ++i) fill(a_part[i], a + i * SHAPE_M * SHAPE_K);
#pragma unroll
  for (int j = 0; j < ACROSS; ++j) fill(b_part[j], b + j * SHAPE_N * SHAPE_K);
#pragma unroll
  for (int i = 0; i < DOWN; ++i)
#pragma unroll
    for (int j = 0; j < ACROSS; ++j) wmma::fill_fragment(sum[i][j], SUM(0));
#pragma unroll 1
  for (int round = 0; round < rounds; ++round)
#pragma unroll
    for (int i = 0; i < DOWN; ++i)
#pragma unroll
      for (int j = 0; j < ACROSS; ++j) wmma::mma_sync(sum[i][j], a_part[i], b_part[j], sum[i][j]);
  SUM all = 0;
#pragma unroll
  for (int i = 0; i < DOWN; ++i)
#pragma unroll
    for (int j = 0; j < ACROSS; ++j)
#pragma unroll
      for (int at = 0; at < sum[i][j].num_elements; ++at) all += sum[i][j].x[at];
  out[blockIdx.x * THREADS + threadIdx.x] = all;
}
