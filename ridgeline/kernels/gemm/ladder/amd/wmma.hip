// WMMA of RDNA 3: a wave of 32 lanes multiplies 16 x 16 x 16 (gfx1100: RX 7900 XTX).
//
// Idea      v_wmma wants all 16 numbers of K of a row in one lane, and the same row in lanes l and l + 16. Both read the
//           same 32 bytes of LDS. A lane's eight sums are in every second row; which row of B lies in which row of the
//           fragment is free, so that lane l takes row 8 (l % 2) + l % 16 / 2, and its sums are eight neighbours of a
//           row of C: 16 bytes. Rows of 64 bytes are exchanged in pieces such that both orders of rows have no conflicts.
//           Two buffers as in the MFMA rung.
// FLOPs     2 M N K on the WMMA units: 8,192 in 32 cycles of a SIMD, and a compute unit has two.
// Bytes     From L2 as the MFMA rungs. From LDS 96 numbers of a wave for 2,048 FMAs, and twice as many into registers.
// Limit     The WMMA units, whose instructions share the SIMD with all others: no vector instruction runs beside one.
// Next      Nothing that this GPU has: its LDS takes no copies from memory. Larger tiles of a wave save loads of LDS.
#include "amd.cuh"

constexpr int ROWS = 128, COLUMNS = 128, DEPTH = 32, THREADS = 256, PIECES = DEPTH / 8;
constexpr int WAVE_ROWS = 64, WAVE_COLUMNS = 32, DOWN = WAVE_ROWS / 16, ACROSS = WAVE_COLUMNS / 16;
constexpr int HELD = ROWS * PIECES / THREADS;  // vectors of a tile that a thread moves

struct Tile {
  Element at[ROWS][DEPTH];
};

__device__ __forceinline__ Element *piece(Tile &tile, int row, int number) {
  return &tile.at[row][(number ^ (row / 2 ^ row / 8 * 2) % PIECES) * 8];
}

__device__ __forceinline__ Row read(Tile &tile, int row, int number) {
  return {load_lds(piece(tile, row, number)), load_lds(piece(tile, row, number + 1))};
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
  int y = wave / 4 * WAVE_ROWS, x = wave % 4 * WAVE_COLUMNS, steps = (k + DEPTH - 1) / DEPTH;
  int mixed = lane % 2 * 8 + lane % 16 / 2;  // the row of B whose sums become neighbours
  Sums<8> sum[DOWN][ACROSS] = {};
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
    for (int d = 0; d < PIECES; d += 2) {
      Row a_part[DOWN], b_part[ACROSS];
#pragma unroll
      for (int i = 0; i < DOWN; ++i) a_part[i] = read(a_tile[step % 2], y + i * 16 + lane % 16, d);
#pragma unroll
      for (int j = 0; j < ACROSS; ++j) b_part[j] = read(b_tile[step % 2], x + j * 16 + mixed, d);
#pragma unroll
      for (int i = 0; i < DOWN; ++i)
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) wmma_16(sum[i][j], b_part[j], a_part[i]);
    }
    put(a_tile[(step + 1) % 2], a_held);  // all have left this buffer at the last barrier
    put(b_tile[(step + 1) % 2], b_held);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < DOWN; ++i)
#pragma unroll
    for (int j = 0; j < ACROSS; ++j) {
      int row = first_row + y + i * 16 + lane % 16, column = first_column + x + j * 16 + lane / 16 * 8;
      Vector vector;
#pragma unroll
      for (int v = 0; v < 8; ++v) round_to(vector.at[v], sum[i][j].at[v]);
      if (row < m && column < n) *reinterpret_cast<Vector *>(c + (size_t)row * n + column) = vector;
    }
}
