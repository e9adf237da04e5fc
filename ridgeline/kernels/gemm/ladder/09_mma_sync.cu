// 9. ldmatrix and mma.sync: fragments whose layout is known, and three stages.
//
// Idea      mma.sync multiplies 16 x 16 by 16 x 8 from registers, and the PTX ISA says which lane holds which number.
//           ldmatrix reads four 8 x 8 matrices in just that layout. So results go from registers to memory, and shared
//           memory can be laid out freely: rows of 128 bytes whose 16-byte pieces are exchanged (piece ^ row % 8), without
//           unused bytes. With three stages two are on their way while one is computed, and one barrier a stage is enough.
// FLOPs     2 M N K on the tensor cores on Ampere at their whole rate, on Hopper at a part (as rung 8).
// Bytes     From L2 as rung 7. From shared memory 96 numbers for 2,048 FMAs of a warp, without conflicts.
// Limit     On Ampere the tensor cores. On Hopper mma.sync itself, whose operands come through registers, and L2.
// Next      Hopper: wgmma reads operands from shared memory, and TMA fills it.
#include "ptx.cuh"

constexpr int ROWS = 128, COLUMNS = 128, DEPTH = 64, STAGES = 3, THREADS = 256;
constexpr int WARP_ROWS = 64, WARP_COLUMNS = 32, DOWN = WARP_ROWS / 16, ACROSS = WARP_COLUMNS / 8;

struct Tile {
  Element at[ROWS][DEPTH];
};
struct Stage {
  Tile a, b;
};

__device__ __forceinline__ Element *piece(Tile &tile, int row, int number) {  // of 8 numbers, 16 bytes
  return &tile.at[row][(number ^ row % 8) * 8];
}

__device__ __forceinline__ void load(Tile &tile, const Element *from, int first, int rows, int start, int k) {
#pragma unroll
  for (int i = threadIdx.x; i < ROWS * DEPTH / 8; i += THREADS) {
    int row = i / 8, at = start + i % 8 * 8;
    bool inside = first + row < rows && at < k;
    cp_async_16(piece(tile, row, i % 8), inside ? from + (size_t)(first + row) * k + at : from, inside);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
gemm(const Element *a, const Element *b, Element *c, int m, int n, int k) {
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
    for (int d = 0; d < DEPTH / 8; d += 2) {  // 16 numbers of K: two pieces
      unsigned a_part[DOWN][4], b_part[ACROSS / 2][4];
#pragma unroll
      for (int i = 0; i < DOWN; ++i)
        ldmatrix_x4(a_part[i], piece(stage.a, y + i * 16 + lane % 16, d + lane / 16));
#pragma unroll
      for (int j = 0; j < ACROSS / 2; ++j)
        ldmatrix_x4(b_part[j], piece(stage.b, x + j * 16 + lane / 16 * 8 + lane % 8, d + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < DOWN; ++i)
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) mma_m16n8k16(sum[i][j], a_part[i], &b_part[j / 2][j % 2 * 2]);
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
        round_to(pair.at[0], sum[i][j][half * 2]);
        round_to(pair.at[1], sum[i][j][half * 2 + 1]);
        if (row < m && column < n) *reinterpret_cast<Pair *>(c + (size_t)row * n + column) = pair;
      }
}
