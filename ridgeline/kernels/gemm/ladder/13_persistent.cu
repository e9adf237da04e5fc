// 13. Persistent: blocks stay, and walk over tiles in an order that L2 likes.
//
// Idea      As many blocks as there are multiprocessors, each of which makes tile after tile. The producer runs ahead into
//           the next tile while consumers store this one. Tiles are taken in groups of 8 rows of tiles, column by column,
//           so that the tiles of one moment share few rows of A and few columns of B, which then stay in L2.
// FLOPs     2 M N K on the tensor cores.
// Bytes     From L2 as rung 12. From memory, with 66 clusters at work: 8 tiles' rows of A and 9 columns of B for 66 tiles.
// Limit     The tensor cores. Both consumers of a block store at the same time, and then its tensor cores stand still.
// Next      Ping-pong: the consumers make tiles of their own, in turn, so that one multiplies while the other stores.
#include "wgmma.cuh"

constexpr int ROWS = 128, COLUMNS = 256, DEPTH = 64, STAGES = 4, CONSUMERS = 2, THREADS = 128 * (1 + CONSUMERS);
constexpr int CLUSTER = 2, SHARE = COLUMNS / CLUSTER, GROUP = 8;

struct Stage {
  Element a[ROWS][DEPTH], b[COLUMNS][DEPTH];
};
struct Shared {
  Stage stages[STAGES];
  Mbarrier full[STAGES], empty[STAGES];
};

// The tiles of a cluster: `down` is one of its two blocks' tiles, of which CLUSTER lie below each other.
struct Walk {
  int work, stride, rows, columns;  // in clusters' tiles

  __device__ Walk(int m, int n)
      : work(blockIdx.x / CLUSTER), stride(gridDim.x / CLUSTER), rows((m + CLUSTER * ROWS - 1) / (CLUSTER * ROWS)),
        columns((n + COLUMNS - 1) / COLUMNS) {}
  __device__ bool more() const { return work < rows * columns; }
  __device__ void next() { work += stride; }
  __device__ int group_row() const { return work / (GROUP * columns) * GROUP; }
  __device__ int group_size() const { return min(rows - group_row(), GROUP); }  // of the last group: fewer rows
  __device__ int first_row() const {
    int row = group_row() + work % (GROUP * columns) % group_size();
    return (row * CLUSTER + (int)cluster_rank()) * ROWS;
  }
  __device__ int first_column() const { return work % (GROUP * columns) / group_size() * COLUMNS; }
};

__device__ __forceinline__ void produce(Shared &shared, const TensorMap &a, const TensorMap &b, Walk walk, int steps) {
  int rank = cluster_rank();
  for (int count = 0; walk.more(); walk.next())
    for (int step = 0; step < steps; ++step, ++count) {  // stages are counted on from tile to tile
      int at = count % STAGES;
      Stage &stage = shared.stages[at];
      mbarrier_wait(&shared.empty[at], count / STAGES % 2 ^ 1);
      mbarrier_expect(&shared.full[at], sizeof(Stage));
      tma_load(stage.a, a, step * DEPTH, walk.first_row(), &shared.full[at]);
      tma_load_multicast(stage.b[rank * SHARE], b, step * DEPTH, walk.first_column() + rank * SHARE, &shared.full[at],
                         (1 << CLUSTER) - 1);
    }
}

__device__ __forceinline__ void consume(Shared &shared, int group, int first, int steps, float (&sum)[COLUMNS / 2]) {
  unsigned lane = threadIdx.x % 32;
  for (int step = 0; step < steps; ++step) {
    int count = first + step, at = count % STAGES;
    Stage &stage = shared.stages[at];
    mbarrier_wait(&shared.full[at], count / STAGES % 2);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < DEPTH; d += 16)
      wgmma_m64n256k16(sum, operand(&stage.a[group * 64][d]), operand(&stage.b[0][d]), step > 0 || d > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (lane < CLUSTER && step > 0) mbarrier_arrive(&shared.empty[(count + STAGES - 1) % STAGES], lane);
  }
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
      mbarrier_init(&shared.empty[i], CONSUMERS * 4 * CLUSTER);
    }
    fence_mbarrier_init();
  }
  cluster_sync();  // the other block's barriers are there
  if (role == CONSUMERS) {
    give_registers<40>();
    if (threadIdx.x % 128 == 0) produce(shared, a, b, Walk(m, n), steps);
  } else {
    take_registers<232>();
    float sum[COLUMNS / 2];  // the first product of a tile writes all
    int count = 0;
    for (Walk walk(m, n); walk.more(); walk.next(), count += steps) {
      consume(shared, role, count, steps, sum);
      store(c, walk.first_row() + role * 64, walk.first_column(), m, n, sum);
    }
  }
  cluster_sync();  // no block leaves while the other may still write to it
}
