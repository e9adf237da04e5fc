// MFMA with two buffers: the next tile is on its way while this one is multiplied (gfx942: MI300).
//
// Idea      gfx942 has no cp.async for 16 bytes, so a tile waits in registers: loads of the next step are issued before
//           this step's products, and stored to the other buffer behind them. The compiler waits for a load where its
//           registers are used, so one barrier a step is left. Two buffers of 128 x 32 take 32 KB, so that two blocks
//           share the 64 KB of LDS; and rows of 64 bytes are exchanged in pieces (piece ^ row / 2 % 4) in place of
//           padding, so that stores, which put two rows side by side, have no conflicts either.
// FLOPs     2 M N K on the matrix cores.
// Bytes     As before, from L2 and from LDS.
// Limit     The matrix cores, if loads arrive within one step: 1,024 cycles of a compute unit for its two blocks.
// Next      Two steps ahead, and an order of instructions that mixes loads of LDS with products (sched_group_barrier).
#include "amd.cuh"

constexpr int ROWS = 128, COLUMNS = 128, DEPTH = 32, THREADS = 256, PIECES = DEPTH / 8;
constexpr int SIZE = 32, OWN = 64, TILES = OWN / SIZE, KEPT = SIZE * SIZE / WAVE;
constexpr int HELD = ROWS * PIECES / THREADS;  // vectors of a tile that a thread moves

struct Tile {
  Element at[ROWS][DEPTH];
};

__device__ __forceinline__ Element *piece(Tile &tile, int row, int number) {
  return &tile.at[row][(number ^ row / 2 % PIECES) * 8];
}

__device__ __forceinline__ void fetch(Vector (&held)[HELD], const Element *from, int first, int rows, int start, int k) {
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    int number = i * THREADS + threadIdx.x, row = first + number / PIECES, at = start + number % PIECES * 8;
    held[i] = {};
    if (row < rows && at < k) held[i] = *reinterpret_cast<const Vector *>(from + (size_t)row * k + at);
  }
}

__device__ __forceinline__ void put(Tile &tile, const Vector (&held)[HELD]) {
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    int number = i * THREADS + threadIdx.x;
    store_lds(piece(tile, number / PIECES, number % PIECES), held[i]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
gemm(const Element *a, const Element *b, Element *c, int m, int n, int k) {
  __shared__ __align__(16) Tile a_tile[2];
  __shared__ __align__(16) Tile b_tile[2];
  int first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS;
  int wave = threadIdx.x / WAVE, lane = lane_of_wave();
  int y = wave / 2 * OWN, x = wave % 2 * OWN, steps = (k + DEPTH - 1) / DEPTH;
  Sums<KEPT> sum[TILES][TILES] = {};
  Vector a_held[HELD], b_held[HELD];

  fetch(a_held, a, first_row, m, 0, k);
  fetch(b_held, b, first_column, n, 0, k);
  put(a_tile[0], a_held);
  put(b_tile[0], b_held);
  __syncthreads();
  for (int step = 0; step < steps; ++step) {
    fetch(a_held, a, first_row, m, (step + 1) * DEPTH, k);  // behind the last step: zeros, without a load
    fetch(b_held, b, first_column, n, (step + 1) * DEPTH, k);
#pragma unroll
    for (int d = 0; d < PIECES; d += 2) {  // a lane's piece has numbers of two products
      Halves a_part[TILES], b_part[TILES];
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        a_part[i] = load_halves(piece(a_tile[step % 2], y + i * SIZE + lane % SIZE, d + lane / SIZE));
        b_part[i] = load_halves(piece(b_tile[step % 2], x + i * SIZE + lane % SIZE, d + lane / SIZE));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
          for (int j = 0; j < TILES; ++j) mfma<SIZE>(sum[i][j], b_part[j].at[half], a_part[i].at[half]);
    }
    put(a_tile[(step + 1) % 2], a_held);  // all have left this buffer at the last barrier
    put(b_tile[(step + 1) % 2], b_held);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int v = 0; v < KEPT; v += 4) {
        int row = first_row + y + i * SIZE + lane % SIZE;
        int column = first_column + x + j * SIZE + 2 * v + lane / SIZE * 4;
        Half vector;
#pragma unroll
        for (int e = 0; e < 4; ++e) round_to(vector.at[e], sum[i][j].at[v + e]);
        if (row < m && column < n) *reinterpret_cast<Half *>(c + (size_t)row * n + column) = vector;
      }
}
