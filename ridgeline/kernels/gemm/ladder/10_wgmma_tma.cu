// 10. WGMMA and TMA: Hopper's own instructions.
//
// Idea      One thread starts the copy of a whole tile; the copy engine (TMA) computes addresses, fills up with zeros, and
//           exchanges pieces as rung 9 did. An mbarrier counts the bytes that came. wgmma lets a warpgroup (128 threads)
//           multiply 64 x 16 by 16 x 128 straight from shared memory, and only the sums are in registers.
// FLOPs     2 M N K on the tensor cores, which wgmma alone can fill.
// Bytes     From L2: (M N K / 128) · 2 numbers of 2 bytes. From shared memory 192 numbers for 8,192 FMAs.
// Limit     L2, whose bytes are those of rung 4; and all wait together at the end of each stage.
// Next      Larger tiles; and one warp that copies, so that others need not wait.
#include "wgmma.cuh"

constexpr int ROWS = 128, COLUMNS = 128, DEPTH = 64, STAGES = 4, THREADS = 256;

struct Stage {
  Element a[ROWS][DEPTH], b[COLUMNS][DEPTH];
};
struct Shared {
  Stage stages[STAGES];
  Mbarrier full[STAGES];
};

extern "C" __global__ void __launch_bounds__(THREADS)
gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, Element *c, int m, int n, int k) {
  Shared &shared = *reinterpret_cast<Shared *>(dynamic_shared());
  int first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS;
  int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  int steps = (k + DEPTH - 1) / DEPTH;
  float sum[COLUMNS / 2];  // the first product writes all

  auto fetch = [&](int step) {
    Stage &stage = shared.stages[step % STAGES];
    Mbarrier *full = &shared.full[step % STAGES];
    mbarrier_expect(full, sizeof(Stage));
    tma_load(stage.a, a, step * DEPTH, first_row, full);
    tma_load(stage.b, b, step * DEPTH, first_column, full);
  };

  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) mbarrier_init(&shared.full[i], 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0)
    for (int step = 0; step < STAGES && step < steps; ++step) fetch(step);
  for (int step = 0; step < steps; ++step) {
    Stage &stage = shared.stages[step % STAGES];
    mbarrier_wait(&shared.full[step % STAGES], step / STAGES % 2);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < DEPTH; d += 16)
      wgmma_m64n128k16(sum, operand(&stage.a[group * 64][d]), operand(&stage.b[0][d]), step > 0 || d > 0);
    wgmma_commit();
    wgmma_wait<0>();
    __syncthreads();  // all have read this stage
    if (threadIdx.x == 0 && step + STAGES < steps) fetch(step + STAGES);
  }
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i += 2) {
    int row = first_row + group * 64 + warp * 16 + lane / 4 + i / 2 % 2 * 8;
    int column = first_column + i / 4 * 8 + lane % 4 * 2;
    Pair pair;
    round_to(pair.at[0], sum[i]);
    round_to(pair.at[1], sum[i + 1]);
    if (row < m && column < n) *reinterpret_cast<Pair *>(c + (size_t)row * n + column) = pair;
  }
}
