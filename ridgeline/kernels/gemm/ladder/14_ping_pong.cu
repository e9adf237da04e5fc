// 14. Ping-pong: one consumer's stores lie behind the other's products.
//
// Idea      Each consumer makes tiles of its own, 64 x 256, and they take turns: while one multiplies, the other rounds and
//           stores, so that the tensor cores do not stand still between tiles. A turn ends when all products of a tile
//           were given to the tensor cores. The producer goes on as if there were one consumer.
// FLOPs     2 M N K on the tensor cores.
// Bytes     From L2: M N K (1 / 256 + 1 / 128) numbers of 2 bytes, since a cluster's two tiles have 128 rows: as rung 11.
//           From shared memory 320 numbers for 16,384 FMAs.
// Limit     L2, if 10 TB/s are all it gives; else the tensor cores, from the first tile to the last.
// Next      Stores that no warp waits for, so that the large tiles of rung 13 can stay.
#include "wgmma.cuh"

constexpr int ROWS = 64, COLUMNS = 256, DEPTH = 64, STAGES = 5, CONSUMERS = 2, THREADS = 128 * (1 + CONSUMERS);
constexpr int CLUSTER = 2, SHARE = COLUMNS / CLUSTER, GROUP = 16;

struct Stage {
  Element a[ROWS][DEPTH], b[COLUMNS][DEPTH];
};
struct Shared {
  Stage stages[STAGES];
  Mbarrier full[STAGES], empty[STAGES], turn[CONSUMERS];
};

struct Walk {  // as in rung 13
  int work, stride, rows, columns;

  __device__ Walk(int m, int n)
      : work(blockIdx.x / CLUSTER), stride(gridDim.x / CLUSTER), rows((m + CLUSTER * ROWS - 1) / (CLUSTER * ROWS)),
        columns((n + COLUMNS - 1) / COLUMNS) {}
  __device__ bool more() const { return work < rows * columns; }
  __device__ void next(int tiles) { work += tiles * stride; }
  __device__ int group_row() const { return work / (GROUP * columns) * GROUP; }
  __device__ int group_size() const { return min(rows - group_row(), GROUP); }
  __device__ int first_row() const {
    int row = group_row() + work % (GROUP * columns) % group_size();
    return (row * CLUSTER + (int)cluster_rank()) * ROWS;
  }
  __device__ int first_column() const { return work % (GROUP * columns) / group_size() * COLUMNS; }
};

__device__ __forceinline__ void produce(Shared &shared, const TensorMap &a, const TensorMap &b, Walk walk, int steps) {
  int rank = cluster_rank();
  for (int count = 0; walk.more(); walk.next(1))
    for (int step = 0; step < steps; ++step, ++count) {
      int at = count % STAGES;
      Stage &stage = shared.stages[at];
      mbarrier_wait(&shared.empty[at], count / STAGES % 2 ^ 1);
      mbarrier_expect(&shared.full[at], sizeof(Stage));
      tma_load(stage.a, a, step * DEPTH, walk.first_row(), &shared.full[at]);
      tma_load_multicast(stage.b[rank * SHARE], b, step * DEPTH, walk.first_column() + rank * SHARE, &shared.full[at],
                         (1 << CLUSTER) - 1);
    }
}

// `first` counts the steps of all tiles before this one, the other consumer's too.
__device__ __forceinline__ void consume(Shared &shared, int group, int first, int steps, float (&sum)[COLUMNS / 2]) {
  unsigned lane = threadIdx.x % 32;
  for (int step = 0; step < steps; ++step) {
    int count = first + step, at = count % STAGES;
    Stage &stage = shared.stages[at];
    mbarrier_wait(&shared.full[at], count / STAGES % 2);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < DEPTH; d += 16)
      wgmma_m64n256k16(sum, operand(&stage.a[0][d]), operand(&stage.b[0][d]), step > 0 || d > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (lane < CLUSTER && step > 0) mbarrier_arrive(&shared.empty[(count + STAGES - 1) % STAGES], lane);
  }
  if (lane == 0) mbarrier_arrive(&shared.turn[group ^ 1]);
  wgmma_wait<0>();
  if (lane < CLUSTER) mbarrier_arrive(&shared.empty[(first + steps - 1) % STAGES], lane);
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
  int role = threadIdx.x / 128, steps = (k + DEPTH - 1) / DEPTH;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(&shared.full[i], 1);
      mbarrier_init(&shared.empty[i], 4 * CLUSTER);  // the warps of one consumer in each block
    }
    for (int i = 0; i < CONSUMERS; ++i) mbarrier_init(&shared.turn[i], 4);
    fence_mbarrier_init();
  }
  cluster_sync();
  if (role == CONSUMERS) {
    give_registers<40>();
    if (threadIdx.x % 128 == 0) produce(shared, a, b, Walk(m, n), steps);
  } else {
    take_registers<232>();
    Walk walk(m, n);
    walk.next(role);
    float sum[COLUMNS / 2];
    for (int tile = role; walk.more(); walk.next(CONSUMERS), tile += CONSUMERS) {
      mbarrier_wait(&shared.turn[role], tile / CONSUMERS % 2 ^ (role == 0));  // the first turn is consumer 0's
      consume(shared, role, tile * steps, steps, sum);
      store(c, walk.first_row(), walk.first_column(), m, n, sum);
    }
  }
  cluster_sync();  // no block leaves while the other may still write to it
}
