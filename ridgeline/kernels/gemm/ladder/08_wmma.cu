// 8. WMMA: the tensor cores, through CUDA's own words.
//
// Idea      A warp multiplies whole matrices: fragments of A and B come from shared memory, and one call makes 16 x 16
//           sums of 16 products each. Who holds which number of a fragment is CUDA's secret, so results go through
//           shared memory on their way out. Other shapes and formats are the same file with other -D: 32x8x16 and
//           8x32x16; fp16, tf32 (16x16x8) and int8.
// FLOPs     2 M N K on the tensor cores. On Hopper WMMA and mma.sync get a part of their rate alone: we assume 63 %.
// Bytes     From L2 as rung 7. From shared memory a warp's tile of 64 x 32 reads 96 numbers for 2,048 FMAs. Each 32 bytes
//           of a row are followed by 16 that nothing uses, so that 8 rows lie in different banks.
// Limit     The tensor cores and L2 alike, if waiting were free: a warp waits for its fragments, and for the one stage
//           that is on its way.
// Next      ldmatrix and mma.sync: fragments whose layout is known, and more stages.
#include "ptx.cuh"
#include "wmma.cuh"

#ifndef SHAPE_M
#define SHAPE_M 16
#define SHAPE_N 16
#define SHAPE_K 16
#define FRAGMENT Element
#define SUM float
#endif
#define SHAPE SHAPE_M, SHAPE_N, SHAPE_K

template <int M_, int N_, int K_> struct Sizes { static constexpr int M = M_, N = N_, K = K_; };
typedef Sizes<SHAPE> Shape;
namespace wmma = nvcuda::wmma;

constexpr int ROWS = 128, COLUMNS = 128, THREADS = 256, WARP_ROWS = 64, WARP_COLUMNS = 32;
constexpr int SIZE = sizeof(Element), DEPTH = 64 / SIZE, PANELS = DEPTH / Shape::K;  // a panel is Shape::K wide
constexpr int PITCH = Shape::K + (SIZE > 1 ? 16 / SIZE : 0), CHUNK = 16 / SIZE;
constexpr int DOWN = WARP_ROWS / Shape::M, ACROSS = WARP_COLUMNS / Shape::N;

struct Tile {
  Element at[PANELS][ROWS][PITCH];
};

__device__ __forceinline__ void load(Tile &tile, const Element *from, int first, int rows, int start, int k) {
#pragma unroll
  for (int i = threadIdx.x; i < ROWS * 4; i += THREADS) {
    int row = i / 4, at = i % 4 * CHUNK;
    bool inside = first + row < rows && start + at < k;
    cp_async_16(&tile.at[at / Shape::K][row][at % Shape::K],
                inside ? from + (size_t)(first + row) * k + start + at : from, inside);
  }
}

template <class Fragment> __device__ __forceinline__ void to_tf32(Fragment &fragment) {
#ifdef TF32
#pragma unroll
  for (int i = 0; i < fragment.num_elements; ++i) fragment.x[i] = wmma::__float_to_tf32(fragment.x[i]);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
gemm(const Element *a, const Element *b, Output *c, int m, int n, int k) {
  __shared__ __align__(128) Tile tiles[2][2];  // of two stages: A's and B's
  int first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int y = warp / 4 * WARP_ROWS, x = warp % 4 * WARP_COLUMNS;
  wmma::fragment<wmma::accumulator, SHAPE, SUM> sum[DOWN][ACROSS];
#pragma unroll
  for (int i = 0; i < DOWN; ++i)
#pragma unroll
    for (int j = 0; j < ACROSS; ++j) wmma::fill_fragment(sum[i][j], SUM(0));
  load(tiles[0][0], a, first_row, m, 0, k);
  load(tiles[0][1], b, first_column, n, 0, k);
  cp_async_commit();
  for (int start = 0, now = 0; start < k; start += DEPTH, now ^= 1) {
    if (start + DEPTH < k) {
      load(tiles[now ^ 1][0], a, first_row, m, start + DEPTH, k);
      load(tiles[now ^ 1][1], b, first_column, n, start + DEPTH, k);
    }
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
      wmma::fragment<wmma::matrix_a, SHAPE, FRAGMENT, wmma::row_major> a_part[DOWN];
      wmma::fragment<wmma::matrix_b, SHAPE, FRAGMENT, wmma::col_major> b_part[ACROSS];
#pragma unroll
      for (int i = 0; i < DOWN; ++i) {
        wmma::load_matrix_sync(a_part[i], tiles[now][0].at[panel][y + i * Shape::M], PITCH);
        to_tf32(a_part[i]);
      }
#pragma unroll
      for (int j = 0; j < ACROSS; ++j) {
        wmma::load_matrix_sync(b_part[j], tiles[now][1].at[panel][x + j * Shape::N], PITCH);
        to_tf32(b_part[j]);
      }
#pragma unroll
      for (int i = 0; i < DOWN; ++i)
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) wmma::mma_sync(sum[i][j], a_part[i], b_part[j], sum[i][j]);
    }
    __syncthreads();
  }
  cp_async_wait<0>();
  SUM *own = reinterpret_cast<SUM *>(tiles) + warp * Shape::M * Shape::N;  // the tiles are used no more
#pragma unroll
  for (int i = 0; i < DOWN; ++i)
#pragma unroll
    for (int j = 0; j < ACROSS; ++j) {
      wmma::store_matrix_sync(own, sum[i][j], Shape::N, wmma::mem_row_major);
      __syncwarp();
      for (int at = lane; at < Shape::M * Shape::N; at += 32) {
        int row = first_row + y + i * Shape::M + at / Shape::N, column = first_column + x + j * Shape::N + at % Shape::N;
        if (row < m && column < n) round_to(c[(size_t)row * n + column], own[at]);
      }
      __syncwarp();
    }
}
