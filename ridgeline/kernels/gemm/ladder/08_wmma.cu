// 8. WMMA: the tensor cores, through CUDA's own words.
//
// Idea      A warp multiplies whole matrices: fragments of A and B come from shared memory, and one call makes 16 x 16
//           sums of 16 products each. Who holds which number of a fragment is CUDA's secret, so results go through
//           shared memory on their way out. A warp has 64 x 64 sums, and three stages are on their way while one is
//           multiplied. Other shapes and formats are the same file with other -D: 32x8x16 and 8x32x16; fp16, tf32
//           (16x16x8) and int8.
// FLOPs     2 M N K on the tensor cores. On Hopper WMMA and mma.sync get a part of their rate alone: we assume 63 %.
// Bytes     From L2 as rung 7. From shared memory a warp reads 128 numbers for 4,096 FMAs. Each 64 bytes of a row are
//           followed by 16 that nothing uses, so that 8 rows lie in different banks.
// Limit     L2 and the tensor cores alike.
// Next      ldmatrix and mma.sync: fragments whose layout is known, and no padding.
#ifndef SHAPE_M
#define SHAPE_M 16
#define SHAPE_N 16
#define SHAPE_K 16
#define FRAGMENT Element
#define SUM float
#endif
#define SHAPE SHAPE_M, SHAPE_N, SHAPE_K
#include "ptx.cuh"
#include "wmma.cuh"

template <int M_, int N_, int K_> struct Sizes { static constexpr int M = M_, N = N_, K = K_; };
typedef Sizes<SHAPE> Shape;
namespace wmma = nvcuda::wmma;

constexpr int ROWS = 128, COLUMNS = 128, THREADS = 128, WARP = 64, STAGES = 4;  // WARP: rows and columns of a warp's sums
constexpr int SIZE = sizeof(Element), DEPTH = 64 / SIZE, CHUNK = 16 / SIZE, DOWN = WARP / Shape::M, ACROSS = WARP / Shape::N;
constexpr int WIDTH = SIZE > 1 ? DEPTH : Shape::K, PITCH = SIZE > 1 ? WIDTH + CHUNK : WIDTH;  // of a panel

struct Tile {  // WMMA wants multiples of 32 bytes, so steps of 16 bytes (int8) have panels of their own
  Element at[DEPTH / WIDTH][ROWS][PITCH];
};
struct Stage {
  Tile a, b;
};

__device__ __forceinline__ void load(Tile &tile, const Element *from, int first, int rows, int start, int k) {
#pragma unroll
  for (int i = threadIdx.x; i < ROWS * 4; i += THREADS) {
    int row = i / 4, at = i % 4 * CHUNK;
    bool inside = first + row < rows && start + at < k;
    cp_async_16(&tile.at[at / WIDTH][row][at % WIDTH], inside ? from + (size_t)(first + row) * k + start + at : from,
                inside);
  }
}

template <class Fragment> __device__ __forceinline__ void fill(Fragment &part, const Tile &tile, int row, int at) {
  load_fragment(part, &tile.at[at / WIDTH][row][at % WIDTH], PITCH);
#ifdef TF32
#pragma unroll
  for (int i = 0; i < part.num_elements; ++i) part.x[i] = wmma::__float_to_tf32(part.x[i]);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
gemm(const Element *a, const Element *b, Output *c, int m, int n, int k) {
  Stage *stages = reinterpret_cast<Stage *>(dynamic_shared());
  int first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int y = warp / 2 * WARP, x = warp % 2 * WARP;
  wmma::fragment<wmma::accumulator, SHAPE, SUM> sum[DOWN][ACROSS];
#pragma unroll
  for (int i = 0; i < DOWN; ++i)
#pragma unroll
    for (int j = 0; j < ACROSS; ++j) wmma::fill_fragment(sum[i][j], SUM(0));
  auto fetch = [&](int step) {
    if (step * DEPTH < k) {
      load(stages[step % STAGES].a, a, first_row, m, step * DEPTH, k);
      load(stages[step % STAGES].b, b, first_column, n, step * DEPTH, k);
    }
    cp_async_commit();
  };
  for (int step = 0; step < STAGES - 1; ++step) fetch(step);
  for (int step = 0; step * DEPTH < k; ++step) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();  // the stage is there, and all have left the one before, which is filled next
    fetch(step + STAGES - 1);
    const Stage &stage = stages[step % STAGES];
#pragma unroll
    for (int at = 0; at < DEPTH; at += Shape::K) {
      wmma::fragment<wmma::matrix_a, SHAPE, FRAGMENT, wmma::row_major> a_part[DOWN];
      wmma::fragment<wmma::matrix_b, SHAPE, FRAGMENT, wmma::col_major> b_part[ACROSS];
#pragma unroll
      for (int i = 0; i < DOWN; ++i) fill(a_part[i], stage.a, y + i * Shape::M, at);
#pragma unroll
      for (int j = 0; j < ACROSS; ++j) fill(b_part[j], stage.b, x + j * Shape::N, at);
#pragma unroll
      for (int i = 0; i < DOWN; ++i)
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) wmma::mma_sync(sum[i][j], a_part[i], b_part[j], sum[i][j]);
    }
  }
  cp_async_wait<0>();
  __syncthreads();
  SUM *own = reinterpret_cast<SUM *>(stages) + warp * Shape::M * Shape::N;  // the stages are used no more
  struct alignas(16) {
    Output at[16 / sizeof(Output)];
  } out;
  constexpr int MANY = 16 / sizeof(Output);
#pragma unroll
  for (int i = 0; i < DOWN; ++i)
#pragma unroll
    for (int j = 0; j < ACROSS; ++j) {
      wmma::store_matrix_sync(own, sum[i][j], Shape::N, wmma::mem_row_major);
      __syncwarp();
#pragma unroll
      for (int at = lane * MANY; at < Shape::M * Shape::N; at += 32 * MANY) {
        int row = first_row + y + i * Shape::M + at / Shape::N, column = first_column + x + j * Shape::N + at % Shape::N;
#pragma unroll
        for (int e = 0; e < MANY; ++e) round_to(out.at[e], own[at + e]);
        if (row < m && column < n) *reinterpret_cast<decltype(out) *>(c + (size_t)row * n + column) = out;
      }
      __syncwarp();
    }
}
