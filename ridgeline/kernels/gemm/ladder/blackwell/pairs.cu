// tcgen05 by pairs: two blocks multiply together, sums lie in tensor memory, and tiles are taken from the grid (sm_100).
//
// Idea      Four things that Blackwell has and Hopper has not:
//           * Pairs. One thread of one block starts a product of 256 x 256 for two neighbouring multiprocessors. Each
//             brings 128 rows of A and 128 of B, and its tensor cores read both halves of B.
//           * Tensor memory. Sums need no registers: 128 lanes x 512 columns hold two tiles' sums, so that one is stored
//             while the next is multiplied. Four warps do nothing but store.
//           * Two pairs are a cluster, below each other. They need the same B, so each block fetches a quarter of it and
//             sends it to its fellow of the other pair (multicast).
//           * Cluster launch control. The grid has a cluster for each tile, as if none stayed. A running cluster asks for
//             one that has not begun, and makes its tile: persistent blocks without a fixed share, so that a slow
//             multiprocessor takes fewer tiles.
// FLOPs     2 M N K on the tensor cores.
// Bytes     From L2: M N K (1 / 256 + 1 / 512) numbers of 2 bytes, half of rung 11's. From shared memory 256 numbers of a
//           multiprocessor for 32,768 FMAs.
// Limit     L2, if it gives 10 TB/s: 0.81 GB for 4096³. Results go to memory from registers, 64 bytes of a row at a time.
// Next      Stores by TMA through shared memory, and an order of tiles that L2 likes.
#include "tcgen05.cuh"

constexpr int ROWS = 128, COLUMNS = 256, DEPTH = 64, STAGES = 6, THREADS = 256;
constexpr int CLUSTER = 4, SHARE = COLUMNS / CLUSTER, ANSWERS = 2;
constexpr int READERS = CLUSTER * 6 + CLUSTER / 2;  // of an answer: producer, asker, 4 warps that store; leaders multiply
constexpr unsigned short ALL = (1 << CLUSTER) - 1;

struct Stage {
  Element a[ROWS][DEPTH], b[COLUMNS / 2][DEPTH];
};
struct Shared {
  Stage stages[STAGES];
  Answer answers[ANSWERS];
  Mbarrier full[STAGES], empty[STAGES], made[2], stored[2], answered[ANSWERS], asked[ANSWERS];
  unsigned tensor;
};

// The tiles of a cluster: its own first, then those that it is given. All roles of all its blocks see the same.
struct Walk {
  Shared &shared;
  int count = 0, x = blockIdx.x / CLUSTER * CLUSTER, y = blockIdx.y;

  __device__ Walk(Shared &shared) : shared(shared) {}
  __device__ int first_row() const { return (x + (int)cluster_rank()) * ROWS; }
  __device__ int first_column() const { return y * COLUMNS; }
  __device__ bool next(int lane = -1) {  // lane: of a role that is a warp; others are one thread
    int at = count % ANSWERS;
    mbarrier_wait(&shared.answered[at], count / ANSWERS % 2);
    bool found = work_of(shared.answers[at], x, y);
    if (lane >= 0) __syncwarp();
    if (lane <= 0) mbarrier_arrive(&shared.asked[at], 0);  // of the block that asks
    ++count;
    return found;
  }
};

__device__ __forceinline__ void ask(Shared &shared) {
  Walk walk(shared);
  do {
    int at = walk.count % ANSWERS;
    mbarrier_expect(&shared.answered[at], sizeof(Answer));
    if (cluster_rank() == 0) {
      mbarrier_wait(&shared.asked[at], walk.count / ANSWERS % 2 ^ 1);  // all have read the answer that was here
      ask_for_work(&shared.answers[at], &shared.answered[at]);
    }
  } while (walk.next());
}

__device__ __forceinline__ void produce(Shared &shared, const TensorMap &a, const TensorMap &b, int steps) {
  int rank = cluster_rank(), pair = rank / 2, half = rank % 2, count = 0;
  Walk walk(shared);
  do {
    for (int step = 0; step < steps; ++step, ++count) {
      int at = count % STAGES;
      Stage &stage = shared.stages[at];
      mbarrier_wait(&shared.empty[at], count / STAGES % 2 ^ 1);
      if (half == 0) mbarrier_expect(&shared.full[at], 2 * sizeof(Stage));  // the leader waits for both blocks' bytes
      tma_load_pair(stage.a, a, step * DEPTH, walk.first_row(), &shared.full[at], 1 << rank);
      tma_load_pair(stage.b[pair * SHARE], b, step * DEPTH, walk.first_column() + half * COLUMNS / 2 + pair * SHARE,
                    &shared.full[at], 0b101 << half);
    }
  } while (walk.next());
}

__device__ __forceinline__ void multiply(Shared &shared, int steps) {
  int count = 0;
  Walk walk(shared);
  do {
    int sums = walk.count % 2;
    mbarrier_wait(&shared.stored[sums], walk.count / 2 % 2 ^ 1);
    tensor_fence_after();
    for (int step = 0; step < steps; ++step, ++count) {
      int at = count % STAGES;
      Stage &stage = shared.stages[at];
      mbarrier_wait(&shared.full[at], count / STAGES % 2);
      tensor_fence_after();
#pragma unroll
      for (int d = 0; d < DEPTH; d += 16)
        pair_multiply(shared.tensor + sums * COLUMNS, tensor_operand(&stage.a[0][d]), tensor_operand(&stage.b[0][d]),
                      pair_product(COLUMNS), step > 0 || d > 0);
      pair_commit(&shared.empty[at], ALL);  // both pairs' blocks write to this stage
    }
    pair_commit(&shared.made[sums], 0b11 << leader_rank());
  } while (walk.next());
}

__device__ __forceinline__ void store(Shared &shared, Element *c, int m, int n) {
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  Walk walk(shared);
  do {
    int sums = walk.count % 2, row = walk.first_row() + warp * 32 + lane;
    mbarrier_wait(&shared.made[sums], walk.count / 2 % 2);
    tensor_fence_after();
    for (int x = 0; x < COLUMNS; x += 32) {
      float sum[32];
      tensor_load(sum, shared.tensor + sums * COLUMNS + x + (warp * 32 << 16));
      tensor_wait();
#pragma unroll
      for (int i = 0; i < 32; i += 8) {
        int column = walk.first_column() + x + i;
        Vector vector;
#pragma unroll
        for (int e = 0; e < 8; ++e) round_to(vector.at[e], sum[i + e]);
        if (row < m && column < n) *reinterpret_cast<Vector *>(c + (size_t)row * n + column) = vector;
      }
    }
    tensor_fence_before();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.stored[sums], leader_rank());
  } while (walk.next(lane));
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, Element *c, int m, int n, int k) {
  Shared &shared = *reinterpret_cast<Shared *>(dynamic_shared());
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, steps = (k + DEPTH - 1) / DEPTH;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(&shared.full[i], 1);
      mbarrier_init(&shared.empty[i], CLUSTER / 2);  // each pair's products have read it
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(&shared.made[i], 1);
      mbarrier_init(&shared.stored[i], 2 * 4);  // the warps of both blocks
      mbarrier_init(&shared.answered[i], 1);
      mbarrier_init(&shared.asked[i], READERS);
    }
    fence_mbarrier_init();
  }
  if (warp == 3) tensor_allocate(&shared.tensor, 2 * COLUMNS);
  tensor_fence_before();
  cluster_sync();
  tensor_fence_after();
  if (warp == 0 && lane == 0) produce(shared, a, b, steps);
  if (warp == 1 && lane == 0 && cluster_rank() == leader_rank()) multiply(shared, steps);
  if (warp == 2 && lane == 0) ask(shared);
  if (warp >= 4) store(shared, c, m, n);
  __syncwarp();
  tensor_fence_before();
  cluster_sync();  // no block leaves while another may still write to it, or multiply for it
  tensor_fence_after();
  if (warp == 3) tensor_free(shared.tensor, 2 * COLUMNS);
}
