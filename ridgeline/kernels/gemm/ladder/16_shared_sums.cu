// 16. Distributed shared memory: two blocks divide K, and exchange sums.
//
// Idea      A product of few rows has fewer tiles than there are multiprocessors. So a cluster of two blocks makes one
//           tile: each multiplies one half of K. Then each gives the sums of one half of the columns to the other, by
//           stores into that block's shared memory (st.async), where the stages lay. An mbarrier there counts the bytes,
//           and each block adds what came to its own half and stores it. Nothing goes through L2, no second kernel adds,
//           and blocks of a cluster always run together, so that waiting is safe.
// FLOPs     2 M N K on the tensor cores.
// Bytes     From L2 as rung 11. Between the blocks of a cluster 64 KB each way for a tile: 1.3 times a step's operands.
// Limit     L2, as rung 11. The exchange is not hidden, so for many tiles rung 15 is better, and for few this one.
#include "wgmma.cuh"

constexpr int ROWS = 128, COLUMNS = 256, DEPTH = 64, STAGES = 4, CONSUMERS = 2, THREADS = 128 * (1 + CONSUMERS);
constexpr int CLUSTER = 2, SHARE = COLUMNS / CLUSTER, SUMS = COLUMNS / 2, HALF = SUMS / CLUSTER;  // sums of a thread

struct Stage {
  Element a[ROWS][DEPTH], b[COLUMNS][DEPTH];
};
struct Shared {
  union {
    Stage stages[STAGES];
    float4 came[HALF / 4][CONSUMERS * 128];  // each thread's numbers of the other block's sums
  };
  Mbarrier full[STAGES], empty[STAGES], ready, sums;
};

// Each block does as many steps; of an odd number one is behind K, where TMA reads zeros.
__device__ __forceinline__ void produce(Shared &shared, const TensorMap &a, const TensorMap &b, int first_row,
                                        int first_column, int first_step, int steps) {
  for (int step = 0; step < steps; ++step) {
    int at = step % STAGES, k = (first_step + step) * DEPTH;
    Stage &stage = shared.stages[at];
    mbarrier_wait(&shared.empty[at], step / STAGES % 2 ^ 1);
    mbarrier_expect(&shared.full[at], sizeof(Stage));
    tma_load(stage.a, a, k, first_row, &shared.full[at]);
    tma_load(stage.b, b, k, first_column, &shared.full[at]);
  }
}

__device__ __forceinline__ void consume(Shared &shared, int group, int steps, float (&sum)[SUMS]) {
  for (int step = 0; step < steps; ++step) {
    Stage &stage = shared.stages[step % STAGES];
    mbarrier_wait(&shared.full[step % STAGES], step / STAGES % 2);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < DEPTH; d += 16)
      wgmma_m64n256k16(sum, operand(&stage.a[group * 64][d]), operand(&stage.b[0][d]), step > 0 || d > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (threadIdx.x % 32 == 0 && step > 0) mbarrier_arrive(&shared.empty[(step + STAGES - 1) % STAGES]);
  }
  wgmma_wait<0>();
}

// Give the other block its half of the columns, and add what it gives.
__device__ __forceinline__ void exchange(Shared &shared, unsigned rank, const float (&sum)[SUMS], float (&own)[HALF]) {
  unsigned other = rank ^ 1;
  if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared.ready, other);  // this warp reads stages no more
  mbarrier_wait(&shared.ready, 0);                                  // and no warp of the other block does
#pragma unroll
  for (int i = 0; i < HALF; i += 4) {
    float4 given = {rank ? sum[i] : sum[HALF + i], rank ? sum[i + 1] : sum[HALF + i + 1],
                    rank ? sum[i + 2] : sum[HALF + i + 2], rank ? sum[i + 3] : sum[HALF + i + 3]};
    store_async(&shared.came[i / 4][threadIdx.x], given, &shared.sums, other);
  }
  mbarrier_wait_cluster(&shared.sums, 0);
#pragma unroll
  for (int i = 0; i < HALF; i += 4) {
    float4 came = shared.came[i / 4][threadIdx.x];
    own[i] = (rank ? sum[HALF + i] : sum[i]) + came.x;
    own[i + 1] = (rank ? sum[HALF + i + 1] : sum[i + 1]) + came.y;
    own[i + 2] = (rank ? sum[HALF + i + 2] : sum[i + 2]) + came.z;
    own[i + 3] = (rank ? sum[HALF + i + 3] : sum[i + 3]) + came.w;
  }
}

__device__ __forceinline__ void store(Element *c, int first_row, int first_column, int m, int n, const float (&own)[HALF]) {
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < HALF; i += 2) {
    int row = first_row + warp * 16 + lane / 4 + i / 2 % 2 * 8, column = first_column + i / 4 * 8 + lane % 4 * 2;
    Pair pair;
    round_to(pair.at[0], own[i]);
    round_to(pair.at[1], own[i + 1]);
    store_if(row < m && column < n, c + (size_t)row * n + column, pair);
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, Element *c, int m, int n, int k) {
  Shared &shared = *reinterpret_cast<Shared *>(dynamic_shared());
  int first_row = blockIdx.x / CLUSTER * ROWS, first_column = blockIdx.y * COLUMNS;
  int role = threadIdx.x / 128, steps = (k + CLUSTER * DEPTH - 1) / (CLUSTER * DEPTH);
  unsigned rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(&shared.full[i], 1);
      mbarrier_init(&shared.empty[i], CONSUMERS * 4);
    }
    mbarrier_init(&shared.ready, CONSUMERS * 4);
    mbarrier_init(&shared.sums, 1);
    fence_mbarrier_init();
    mbarrier_expect(&shared.sums, sizeof(shared.came));
  }
  cluster_sync();  // the other block's barriers are there
  if (role == CONSUMERS) {
    give_registers<40>();
    if (threadIdx.x % 128 == 0) produce(shared, a, b, first_row, first_column, rank * steps, steps);
  } else {
    take_registers<232>();
    float sum[SUMS], own[HALF];  // the first product writes all
    consume(shared, role, steps, sum);
    exchange(shared, rank, sum, own);
    store(c, first_row + role * 64, first_column + rank * SHARE, m, n, own);
  }  // a block ends when all that the other one writes to it has come
}
