// 12. Clusters with multicast: two blocks share a tile of B.
//
// Idea      Two blocks that make tiles below each other need the same tile of B. As a cluster they lie side by side, and
//           TMA can write to both: each fetches half of the tile of B and sends it to both, so L2 is asked once. A stage
//           is empty when the consumers of both blocks have left it, so they arrive at the empty barriers of both.
// FLOPs     2 M N K on the tensor cores.
// Bytes     From L2: M N K / 256 numbers of A, and as many of B, which is fetched once for 256 rows: half of rung 10's
//           bytes. From shared memory as rung 11.
// Limit     The tensor cores: 4,096 FLOPs a cycle and multiprocessor. Blocks still begin and end together: while one wave
//           of tiles is stored, nothing multiplies.
// Next      Blocks that stay, and walk over tiles in an order that L2 likes.
#include "wgmma.cuh"

constexpr int ROWS = 128, COLUMNS = 256, DEPTH = 64, STAGES = 4, CONSUMERS = 2, THREADS = 128 * (1 + CONSUMERS);
constexpr int CLUSTER = 2, SHARE = COLUMNS / CLUSTER;

struct Stage {
  Element a[ROWS][DEPTH], b[COLUMNS][DEPTH];
};
struct Shared {
  Stage stages[STAGES];
  Mbarrier full[STAGES], empty[STAGES];
};

__device__ __forceinline__ void produce(Shared &shared, const TensorMap &a, const TensorMap &b, int first_row,
                                        int first_column, int steps) {
  int rank = cluster_rank();
  for (int step = 0; step < steps; ++step) {
    int at = step % STAGES;
    Stage &stage = shared.stages[at];
    mbarrier_wait(&shared.empty[at], step / STAGES % 2 ^ 1);
    mbarrier_expect(&shared.full[at], sizeof(Stage));  // half of B comes from the other block
    tma_load(stage.a, a, step * DEPTH, first_row, &shared.full[at]);
    tma_load_multicast(stage.b[rank * SHARE], b, step * DEPTH, first_column + rank * SHARE, &shared.full[at],
                       (1 << CLUSTER) - 1);
  }
}

__device__ __forceinline__ void consume(Shared &shared, int group, int steps, float (&sum)[COLUMNS / 2]) {
  unsigned lane = threadIdx.x % 32;
  for (int step = 0; step < steps; ++step) {
    Stage &stage = shared.stages[step % STAGES];
    mbarrier_wait(&shared.full[step % STAGES], step / STAGES % 2);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < DEPTH; d += 16)
      wgmma_m64n256k16(sum, operand(&stage.a[group * 64][d]), operand(&stage.b[0][d]), step > 0 || d > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (lane < CLUSTER && step > 0) mbarrier_arrive(&shared.empty[(step + STAGES - 1) % STAGES], lane);  // that block's
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

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, Element *c, int m, int n, int k) {
  Shared &shared = *reinterpret_cast<Shared *>(dynamic_shared());
  int first_row = blockIdx.x * ROWS, first_column = blockIdx.y * COLUMNS;  // a cluster is two blocks along x
  int role = threadIdx.x / 128, steps = (k + DEPTH - 1) / DEPTH;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(&shared.full[i], 1);
      mbarrier_init(&shared.empty[i], CONSUMERS * 4 * CLUSTER);
    }
    fence_mbarrier_init();
  }
  cluster_sync();  // the other block's barriers are there
  if (role == CONSUMERS) {
    give_registers<40>();
    if (threadIdx.x % 128 == 0) produce(shared, a, b, first_row, first_column, steps);
  } else {
    take_registers<232>();
    float sum[COLUMNS / 2];  // the first product writes all
    consume(shared, role, steps, sum);
    store(c, first_row + role * 64, first_column, m, n, sum);
  }
  cluster_sync();  // no block leaves while the other may still write to it
}
