// 9. ldmatrix and mma.sync: fragments whose layout is known, and no padding.
//
// Idea      mma.sync multiplies 16 x 16 by 16 x 8 from registers, and the PTX ISA says which lane holds which number.
//           ldmatrix reads four 8 x 8 matrices in just that layout. So results go from registers to memory, and shared
//           memory can be laid out freely: rows of 128 bytes whose 16-byte pieces are exchanged (piece ^ row % 8), without
//           unused bytes. The rest is rung 8, but for groups of tiles: their numbers would need a register too many.
// FLOPs     2 M N K on the tensor cores on Ampere at their whole rate, on Hopper at a part (as rung 8).
// Bytes     From L2 and from shared memory as rung 8, without conflicts.
// Limit     On Ampere the tensor cores. On Hopper mma.sync itself, whose operands come through registers.
// Next      Hopper: wgmma reads operands from shared memory, and TMA fills it.
#include "ptx.cuh"

constexpr int ROWS = 256, COLUMNS = 128, DEPTH = 64, STAGES = 4, THREADS = 256;
constexpr int WARP = 64, DOWN = WARP / 16, ACROSS = WARP / 8, PARTS = DEPTH / 16;

template <int MANY> struct Tile {
  Element at[MANY][DEPTH];

  __device__ Element *piece(int row, int number) { return &at[row][(number ^ row % 8) * 8]; }  // of 8 numbers, 16 bytes
};
struct Stage {
  Tile<ROWS> a;
  Tile<COLUMNS> b;
};
struct Fragments {
  unsigned a[DOWN][4], b[ACROSS / 2][4];
};

// Copy part `part` of PARTS - 1 of a tile. In place of rows that do not exist the last one is copied.
template <int MANY>
__device__ __forceinline__ void copy(Tile<MANY> &tile, const Element *from, int first, int rows, int start, int k, int part) {
  int row = threadIdx.x / 8, at = start + threadIdx.x % 8 * 8;
  bool inside = at < k;
  from += inside ? at : 0;
#pragma unroll
  for (int i = 0; i < MANY * 8 / THREADS; ++i)
    if (i % (PARTS - 1) == part)
      cp_async_16(tile.piece(row + i * THREADS / 8, threadIdx.x % 8),
                  from + (size_t)min(first + row + i * THREADS / 8, rows - 1) * k, inside);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gemm(const Element *a, const Element *b, Element *c, int m, int n, int k) {
  Stage *stages = reinterpret_cast<Stage *>(dynamic_shared());
  int first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS, steps = (k + DEPTH - 1) / DEPTH;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int y = warp / (COLUMNS / WARP) * WARP, x = warp % (COLUMNS / WARP) * WARP;
  float sum[DOWN][ACROSS][4] = {};
  auto fetch = [&](Stage &stage, int step, int part) {
    if (step < steps) {
      copy(stage.a, a, first_row, m, step * DEPTH, k, part);
      copy(stage.b, b, first_column, n, step * DEPTH, k, part);
    }
  };
  Fragments sets[2];
  auto load = [&](Fragments &set, Stage &stage, int part) {  // 16 numbers of K: two pieces
#pragma unroll
    for (int i = 0; i < DOWN; ++i) ldmatrix_x4(set.a[i], stage.a.piece(y + i * 16 + lane % 16, part * 2 + lane / 16));
#pragma unroll
    for (int j = 0; j < ACROSS / 2; ++j)
      ldmatrix_x4(set.b[j], stage.b.piece(x + j * 16 + lane / 16 * 8 + lane % 8, part * 2 + lane / 8 % 2));
  };
  for (int step = 0; step < STAGES - 1; ++step) {
#pragma unroll
    for (int part = 0; part < PARTS - 1; ++part) fetch(stages[step], step, part);
    cp_async_commit();
  }
  cp_async_wait<STAGES - 2>();
  __syncthreads();
  load(sets[0], stages[0], 0);
  Stage *now = stages, *before = stages + STAGES - 1;
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      if (part < PARTS - 1) {
        load(sets[(part + 1) % 2], *now, part + 1);
        fetch(*before, step + STAGES - 1, part);  // all have left the stage before this one
      } else {
        cp_async_commit();
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // the next stage is there, and all have loaded the last fragments of this one
        before = now;
        now = now == stages + STAGES - 1 ? stages : now + 1;
        load(sets[0], *now, 0);  // behind the last step: of a stage whose fragments nothing uses
      }
      Fragments &set = sets[part % 2];
#pragma unroll
      for (int i = 0; i < DOWN; ++i)
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) mma_m16n8k16(sum[i][j], set.a[i], &set.b[j / 2][j % 2 * 2]);
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
