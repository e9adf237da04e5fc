// MFMA: a wave of 64 lanes multiplies 32 x 32 x 8 (gfx942: MI300).
//
// Idea      v_mfma multiplies fragments in registers, as mma.sync does in rung 9. Three things are AMD's own:
//           * There is no ldmatrix: lanes read their fragments from LDS. A lane needs 4 numbers of K for one product, and
//             the order of K is free where A and B agree. So a lane reads 8 (16 bytes), for two products.
//           * A row of a tile is 128 bytes, all 32 banks. 16 unused bytes behind each row (padding) put the rows that
//             eight lanes read side by side into other banks.
//           * A lane's four sums lie below each other. With B as the left operand they lie beside each other in C, and
//             go to memory as 8 bytes.
// FLOPs     2 M N K on the matrix cores: 16,384 in 32 cycles of a SIMD, and a compute unit has four.
// Bytes     From L2 as rung 7: M N K (1 / 128 + 1 / 128) numbers of 2 bytes. From LDS 128 numbers of a wave for 4,096
//           FMAs, of which the matrix cores do 1,024 a cycle and compute unit.
// Limit     A wave waits for memory, then for LDS, then multiplies: no two of them at the same time, but for other blocks.
// Next      Load the next tile while this one is multiplied.
#include "amd.cuh"

#ifndef SIZE
#define SIZE 32  // or 16: v_mfma_f32_16x16x16, of which eight lanes that go together read two pieces, and meet in banks
#endif

constexpr int ROWS = 128, COLUMNS = 128, DEPTH = 64, PADDING = 8, THREADS = 256;
constexpr int OWN = 64, TILES = OWN / SIZE, KEPT = SIZE * SIZE / WAVE;  // a wave makes 64 x 64
constexpr int STEP = 8 * WAVE / SIZE;                                   // numbers of K of two products

struct Tile {
  Element at[ROWS][DEPTH + PADDING];
};

__device__ __forceinline__ void load(Tile &tile, const Element *from, int first, int rows, int start, int k) {
  constexpr int PIECES = DEPTH / 8, HELD = ROWS * PIECES / THREADS;
  Vector held[HELD];  // all are on their way before the first is stored
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    int number = i * THREADS + threadIdx.x, row = first + number / PIECES, at = start + number % PIECES * 8;
    held[i] = {};
    if (row < rows && at < k) held[i] = *reinterpret_cast<const Vector *>(from + (size_t)row * k + at);
  }
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    int number = i * THREADS + threadIdx.x;
    store_lds(&tile.at[number / PIECES][number % PIECES * 8], held[i]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
gemm(const Element *a, const Element *b, Element *c, int m, int n, int k) {
  __shared__ __align__(16) Tile a_tile;
  __shared__ __align__(16) Tile b_tile;
  int first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS;
  int wave = threadIdx.x / WAVE, lane = lane_of_wave();
  int y = wave / 2 * OWN, x = wave % 2 * OWN;
  Sums<KEPT> sum[TILES][TILES] = {};
  for (int start = 0; start < k; start += DEPTH) {
    load(a_tile, a, first_row, m, start, k);
    load(b_tile, b, first_column, n, start, k);
    __syncthreads();
#pragma unroll
    for (int d = 0; d < DEPTH; d += STEP) {
      Halves a_part[TILES], b_part[TILES];
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        a_part[i] = load_halves(&a_tile.at[y + i * SIZE + lane % SIZE][d + lane / SIZE * 8]);
        b_part[i] = load_halves(&b_tile.at[x + i * SIZE + lane % SIZE][d + lane / SIZE * 8]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
          for (int j = 0; j < TILES; ++j) mfma<SIZE>(sum[i][j], b_part[j].at[half], a_part[i].at[half]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int v = 0; v < KEPT; v += 4) {
        int row = first_row + y + i * SIZE + lane % SIZE;
        int column = first_column + x + j * SIZE + WAVE / SIZE * v + lane / SIZE * 4;
        Half vector;
#pragma unroll
        for (int e = 0; e < 4; ++e) round_to(vector.at[e], sum[i][j].at[v + e]);
        if (row < m && column < n) *reinterpret_cast<Half *>(c + (size_t)row * n + column) = vector;
      }
}
