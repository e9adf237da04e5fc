// 11. Producer and consumers: one warp copies, two warpgroups multiply.
//
// Idea      Roles in place of barriers of the block. The producer fills stages as they become empty; consumers multiply
//           as stages become full, and each leaves one step's products running, so that the tensor cores always have
//           some. A full and an empty mbarrier for each stage are all that they share. setmaxnreg gives the producer's
//           registers to the consumers, so that each can hold 64 x 256 sums, and the tile is 128 x 256.
// FLOPs     2 M N K on the tensor cores.
// Bytes     From L2: M N K (1 / 128 + 1 / 256) numbers of 2 bytes, three quarters of rung 10's. From shared memory 320
//           numbers for 16,384 FMAs.
// Limit     L2.
// Next      Two blocks that share a tile of B.
#include "wgmma.cuh"

constexpr int ROWS = 128, COLUMNS = 256, DEPTH = 64, STAGES = 4, CONSUMERS = 2, THREADS = 128 * (1 + CONSUMERS);

struct Stage {
  Element a[ROWS][DEPTH], b[COLUMNS][DEPTH];
};
struct Shared {
  Stage stages[STAGES];
  Mbarrier full[STAGES], empty[STAGES];
};

__device__ __forceinline__ void produce(Shared &shared, const TensorMap &a, const TensorMap &b, int first_row,
                                        int first_column, int steps) {
  for (int step = 0; step < steps; ++step) {
    int at = step % STAGES;
    Stage &stage = shared.stages[at];
    mbarrier_wait(&shared.empty[at], step / STAGES % 2 ^ 1);  // the first round finds all stages empty
    mbarrier_expect(&shared.full[at], sizeof(Stage));
    tma_load(stage.a, a, step * DEPTH, first_row, &shared.full[at]);
    tma_load(stage.b, b, step * DEPTH, first_column, &shared.full[at]);
  }
}

__device__ __forceinline__ void consume(Shared &shared, int group, int steps, float (&sum)[COLUMNS / 2]) {
  for (int step = 0; step < steps; ++step) {
    Stage &stage = shared.stages[step % STAGES];
    mbarrier_wait(&shared.full[step % STAGES], step / STAGES % 2);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < DEPTH; d += 16)
      wgmma_m64n256k16(sum, operand(&stage.a[group * 64][d]), operand(&stage.b[0][d]), step > 0 || d > 0);
    wgmma_commit();
    wgmma_wait<1>();  // the step before has ended, and each warp leaves its stage for itself
    if (threadIdx.x % 32 == 0 && step > 0) mbarrier_arrive(&shared.empty[(step + STAGES - 1) % STAGES]);
  }
  wgmma_wait<0>();
}

__device__ __forceinline__ void store(Element *c, int first_row, int first_column, int m, int n,
                                      const float (&sum)[COLUMNS / 2]) {
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i += 2) {
    int row = first_row + warp * 16 + lane / 4 + i / 2 % 2 * 8, column = first_column + i / 4 * 8 + lane % 4 * 2;
    Pair pair;
    round_to(pair.at[0], sum[i]);
    round_to(pair.at[1], sum[i + 1]);
    store_if(row < m && column < n, c + (size_t)row * n + column, pair);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, Element *c, int m, int n, int k) {
  Shared &shared = *reinterpret_cast<Shared *>(dynamic_shared());
  int first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS;
  int role = threadIdx.x / 128, steps = (k + DEPTH - 1) / DEPTH;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(&shared.full[i], 1);
      mbarrier_init(&shared.empty[i], CONSUMERS * 4);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (role == CONSUMERS) {
    give_registers<40>();
    if (threadIdx.x % 128 == 0) produce(shared, a, b, first_row, first_column, steps);
  } else {
    take_registers<232>();
    float sum[COLUMNS / 2];  // the first product writes all
    consume(shared, role, steps, sum);
    store(c, first_row + role * 64, first_column, m, n, sum);
  }
}
