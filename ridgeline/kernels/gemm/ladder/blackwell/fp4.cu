// Block-scaled FP4: mma.sync with 4-bit numbers and a scale for each 16 of them (sm_120: RTX 50, RTX PRO 6000).
//
// Idea      Rung 9 with another format. 64 numbers of K are 32 bytes, as 16 of bfloat16 are, so tiles, swizzle and ldmatrix
//           stay: a fragment's register has eight numbers in place of two. What is new are the scales, and the tensor
//           cores apply them: a row's four scales of 64 numbers are one register. In memory they lie as cuBLAS wants them,
//           512 bytes for 128 rows and 64 of K, the scales of row r at 16 (r % 32) + 4 (r / 32): a tile's scales are
//           copied as they are, and a lane reads its four as a word.
// FLOPs     2 M N K on the tensor cores, eight times as fast as bfloat16 on this GPU.
// Bytes     9/16 of a byte a number, scale included. From L2: M N K (1 / 128 + 1 / 128) numbers. From shared memory 96
//           numbers for 2,048 FMAs of a warp, and for each 64 of K a word for each row and column.
// Limit     The tensor cores, if L2 gives 8 TB/s; and two stages, of which one is on its way: 99 KB hold no third.
// Next      TMA and warps with roles as in rung 11; sm_120 has both, but neither wgmma nor tensor memory.
#include "fp4.cuh"

constexpr int ROWS = 128, COLUMNS = 128, DEPTH = 256, STAGES = 2, THREADS = 256, BYTES = DEPTH / 2;
constexpr int WARP_ROWS = 64, WARP_COLUMNS = 32, DOWN = WARP_ROWS / 16, ACROSS = WARP_COLUMNS / 8;
constexpr int BLOCK = 64, SCALES = 512;  // numbers of K of a tile of scales, and its bytes

struct Tile {
  unsigned char at[ROWS][BYTES];
  unsigned char scales[DEPTH / BLOCK][SCALES];
};
struct Stage {
  Tile a, b;
};
struct Matrix {
  const unsigned char *numbers, *scales;
};

__device__ __forceinline__ unsigned char *piece(Tile &tile, int row, int number) {  // of 32 numbers, 16 bytes
  return &tile.at[row][(number ^ row % 8) * 16];
}

__device__ __forceinline__ unsigned scales_of(const Tile &tile, int block, int row) {
  return *reinterpret_cast<const unsigned *>(&tile.scales[block][row % 32 * 16 + row / 32 * 4]);
}

__device__ __forceinline__ void load(Tile &tile, Matrix from, int first, int rows, int start, int k) {
#pragma unroll
  for (int i = threadIdx.x; i < ROWS * BYTES / 16; i += THREADS) {
    int row = i / 8, at = start + i % 8 * 32;
    bool inside = first + row < rows && at < k;
    cp_async_16(piece(tile, row, i % 8), inside ? from.numbers + ((size_t)(first + row) * k + at) / 2 : from.numbers,
                inside);
  }
  int i = threadIdx.x % 128, blocks = (k + BLOCK - 1) / BLOCK, block = start / BLOCK + i / 32;
  const unsigned char *tiles = from.scales + ((size_t)first / ROWS * blocks + block) * SCALES;
  cp_async_16(&tile.scales[i / 32][i % 32 * 16], block < blocks ? tiles + i % 32 * 16 : from.scales, block < blocks);
}

extern "C" __global__ void __launch_bounds__(THREADS)
gemm(Matrix a, Matrix b, float scale, Element *c, int m, int n, int k) {
  Stage *stages = reinterpret_cast<Stage *>(dynamic_shared());
  int first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int y = warp / 4 * WARP_ROWS, x = warp % 4 * WARP_COLUMNS;
  int steps = (k + DEPTH - 1) / DEPTH;
  float sum[DOWN][ACROSS][4] = {};

  auto fetch = [&](int step) {
    if (step < steps) {
      load(stages[step % STAGES].a, a, first_row, m, step * DEPTH, k);
      load(stages[step % STAGES].b, b, first_column, n, step * DEPTH, k);
    }
    cp_async_commit();
  };

  for (int step = 0; step < STAGES - 1; ++step) fetch(step);
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();  // this stage is here for all, and all have left the one before, which is filled next
    fetch(step + STAGES - 1);
    Stage &stage = stages[step % STAGES];
#pragma unroll
    for (int d = 0; d < DEPTH / BLOCK; ++d) {  // 64 numbers of K: two pieces, and one word of scales
      unsigned a_part[DOWN][4], b_part[ACROSS / 2][4], a_scales[DOWN], b_scales[ACROSS];
#pragma unroll
      for (int i = 0; i < DOWN; ++i) {
        ldmatrix_x4(a_part[i], piece(stage.a, y + i * 16 + lane % 16, 2 * d + lane / 16));
        a_scales[i] = scales_of(stage.a, d, y + i * 16 + lane % 2 * 8 + lane / 4);
      }
#pragma unroll
      for (int j = 0; j < ACROSS / 2; ++j)
        ldmatrix_x4(b_part[j], piece(stage.b, x + j * 16 + lane / 16 * 8 + lane % 8, 2 * d + lane / 8 % 2));
#pragma unroll
      for (int j = 0; j < ACROSS; ++j) b_scales[j] = scales_of(stage.b, d, x + j * 8 + lane / 4);
#pragma unroll
      for (int i = 0; i < DOWN; ++i)
#pragma unroll
        for (int j = 0; j < ACROSS; ++j)
          mma_fp4(sum[i][j], a_part[i], &b_part[j / 2][j % 2 * 2], a_scales[i], b_scales[j]);
    }
  }
  cp_async_wait<0>();
#pragma unroll
  for (int i = 0; i < DOWN; ++i)
#pragma unroll
    for (int j = 0; j < ACROSS; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row = first_row + y + i * 16 + lane / 4 + half * 8, column = first_column + x + j * 8 + lane % 4 * 2;
        Pair pair;
        round_to(pair.at[0], scale * sum[i][j][half * 2]);
        round_to(pair.at[1], scale * sum[i][j][half * 2 + 1]);
        if (row < m && column < n) *reinterpret_cast<Pair *>(c + (size_t)row * n + column) = pair;
      }
}
