// 8. WMMA: the tensor cores, through CUDA's own words.
//
// Idea      A warp multiplies whole matrices: fragments of A and B come from shared memory, and one call makes 16 x 16
//           sums of 16 products each. Who holds which number of a fragment is CUDA's secret, so results go through
//           shared memory on their way out. A warp has 64 x 64 sums and two sets of fragments: one is loaded while the
//           other is multiplied, across stages too. Copies of the stage that comes are spread over the products. Blocks
//           take tiles in groups of 8 rows of tiles, column by column, so that L2 has more of what they need. Other
//           shapes and formats are the same file with other -D: 32x8x16 and 8x32x16; fp16, tf32 (16x16x8) and int8.
// FLOPs     2 M N K on the tensor cores. On Hopper WMMA and mma.sync get a part of their rate alone: we assume 63 %.
// Bytes     From L2: M N K (1 / 256 + 1 / 128) numbers. From shared memory a warp reads 128 numbers for 4,096 FMAs. Each
//           128 bytes of a row are followed by 16 that nothing uses, so that 8 rows lie in different banks.
// Limit     The tensor cores; shared memory is busy for 86 % of their time.
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

namespace wmma = nvcuda::wmma;

constexpr int ROWS = 256, COLUMNS = 128, THREADS = 256, STAGES = 3, GROUP = 8;  // rows of tiles, made together
constexpr int WARP = 64;  // rows and columns of a warp's sums
constexpr int SIZE = sizeof(Element), DEPTH = 128 / SIZE, CHUNK = 16 / SIZE, DOWN = WARP / SHAPE_M, ACROSS = WARP / SHAPE_N;
// WMMA wants multiples of 32 bytes. Steps of 16 bytes (int8) therefore have panels of their own, of 16 bytes a row. Eight
// lanes go together, and where two of them meet in a bank, L2 is asked twice. So they copy 64 bytes of two rows, to four
// panels; with 32 bytes behind each panel none meet. In other formats they copy 128 bytes of a row.
constexpr bool PANELS = SIZE == 1;
constexpr int WIDTH = PANELS ? SHAPE_K : DEPTH, PITCH = PANELS ? WIDTH : WIDTH + CHUNK, PARTS = DEPTH / SHAPE_K;

template <int MANY> struct Tile {
  Element at[DEPTH / WIDTH][MANY * PITCH + (PANELS ? 32 : 0)];

  __device__ Element *place(int row, int k) { return &at[k / WIDTH][row * PITCH + k % WIDTH]; }
};
struct Stage {
  Tile<ROWS> a;
  Tile<COLUMNS> b;
};
struct Fragments {
  wmma::fragment<wmma::matrix_a, SHAPE, FRAGMENT, wmma::row_major> a[DOWN];
  wmma::fragment<wmma::matrix_b, SHAPE, FRAGMENT, wmma::col_major> b[ACROSS];
};

// This thread's row of each 32, and its piece of 16 bytes of that row.
__device__ __forceinline__ int own_row() {
  return PANELS ? threadIdx.x / 16 * 2 + threadIdx.x % 8 / 4 : threadIdx.x / 8;
}
__device__ __forceinline__ int own_piece() {
  return (PANELS ? threadIdx.x / 8 % 2 * 4 + threadIdx.x % 4 : threadIdx.x % 8) * CHUNK;
}

// Copy part `part` of PARTS - 1 of a tile. `from` is this thread's first piece of the tile, of which it copies every 32nd
// row; `left` rows of the matrix are there, and zeros take the place of others.
template <int MANY>
__device__ __forceinline__ void copy(Tile<MANY> &tile, const Element *from, int left, bool inside, int k, int part) {
  constexpr int APART = THREADS / 8, AGAIN = PARTS - 1;
  from += (size_t)part * APART * k;
#pragma unroll
  for (int i = part; i < MANY / APART; i += AGAIN, from += (size_t)AGAIN * APART * k)
    cp_async_16(tile.place(own_row() + i * APART, own_piece()), from, inside && i * APART < left);
}

// Round the numbers of fragments, which tf32 wants: where they are used, as what was just asked for is not there yet.
__device__ __forceinline__ void settle(Fragments &set) {
#ifdef TF32
#pragma unroll
  for (int i = 0; i < DOWN; ++i)
#pragma unroll
    for (float &x : set.a[i].x) x = wmma::__float_to_tf32(x);
#pragma unroll
  for (int j = 0; j < ACROSS; ++j)
#pragma unroll
    for (float &x : set.b[j].x) x = wmma::__float_to_tf32(x);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gemm(const Element *a, const Element *b, Output *c, int m, int n, int k) {
  Stage *stages = reinterpret_cast<Stage *>(dynamic_shared());
  int number = blockIdx.y * gridDim.x + blockIdx.x, group = number / (GROUP * gridDim.x) * GROUP;
  int rows = min(GROUP, int(gridDim.y) - group), place = number - group * gridDim.x;
  int first_row = (group + place % rows) * ROWS, first_column = place / rows * COLUMNS;
  int steps = (k + DEPTH - 1) / DEPTH;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int y = warp / (COLUMNS / WARP) * WARP, x = warp % (COLUMNS / WARP) * WARP;
  wmma::fragment<wmma::accumulator, SHAPE, SUM> sum[DOWN][ACROSS];
#pragma unroll
  for (int i = 0; i < DOWN; ++i)
#pragma unroll
    for (int j = 0; j < ACROSS; ++j) wmma::fill_fragment(sum[i][j], SUM(0));
  int a_row = first_row + own_row(), b_row = first_column + own_row(), piece = own_piece();
  const Element *a_at = a + (size_t)a_row * k + piece, *b_at = b + (size_t)b_row * k + piece;
  auto fetch = [&](Stage &stage, int step, int part) {
    int start = step * DEPTH;
    copy(stage.a, a_at + start, m - a_row, start + piece < k, k, part);
    copy(stage.b, b_at + start, n - b_row, start + piece < k, k, part);
  };
  Fragments sets[2];
  auto load = [&](Fragments &set, Stage &stage, int part) {
#pragma unroll
    for (int i = 0; i < DOWN; ++i) load_fragment(set.a[i], stage.a.place(y + i * SHAPE_M, part * SHAPE_K), PITCH);
#pragma unroll
    for (int j = 0; j < ACROSS; ++j) load_fragment(set.b[j], stage.b.place(x + j * SHAPE_N, part * SHAPE_K), PITCH);
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
      settle(set);
#pragma unroll
      for (int i = 0; i < DOWN; ++i)
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) wmma::mma_sync(sum[i][j], set.a[i], set.b[j], sum[i][j]);
    }
  }
  cp_async_wait<0>();
  __syncthreads();  // the stages are used no more
  constexpr int MANY = 16 / sizeof(Output), PADDED = WARP + 8;
  SUM *own = reinterpret_cast<SUM *>(stages) + warp * WARP * PADDED;
#pragma unroll
  for (int i = 0; i < DOWN; ++i)
#pragma unroll
    for (int j = 0; j < ACROSS; ++j)
      wmma::store_matrix_sync(own + i * SHAPE_M * PADDED + j * SHAPE_N, sum[i][j], PADDED, wmma::mem_row_major);
  __syncwarp();
#pragma unroll 4
  for (int at = lane * MANY; at < WARP * WARP; at += 32 * MANY) {
    int row = at / WARP, column = at % WARP;
    struct alignas(16) {
      Output at[MANY];
    } out;
#pragma unroll
    for (int e = 0; e < MANY; ++e) round_to(out.at[e], own[row * PADDED + column + e]);
    row += first_row + y, column += first_column + x;
    if (row < m && column < n) *reinterpret_cast<decltype(out) *>(c + (size_t)row * n + column) = out;
  }
}
