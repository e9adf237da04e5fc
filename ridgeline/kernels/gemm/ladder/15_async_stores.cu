// 15. Stores by TMA: a tile leaves through shared memory while the next one is multiplied.
//
// Idea      Rung 13's tiles and walk, and a store that no warp waits for. A warp rounds 64 columns of its 16 rows at a
//           time, stmatrix writes them to 2 KB of its own, exchanged as TMA wants them, and one lane starts their copy to
//           C. Two such buffers take turns. Rows of 128 bytes leave whole, where a warp's own stores write 16 bytes of
//           each of eight rows. The warp that is done goes on with its next tile, whose stages came meanwhile. Since the
//           two consumers do not wait for each other, one of them is soon a stage ahead, and then its stores lie behind
//           the other's products as in rung 14. On their way sums pass through an epilogue (epilogue.cuh), which costs
//           nothing as long as it is shorter than those products. Operands may have 8, 16 or 32 bits: a stage's rows are
//           128 bytes of whatever format, and so are a strip's.
// FLOPs     2 M N K on the tensor cores.
// Bytes     As rung 13.
// Limit     The tensor cores, and the power that they take.
// Next      Products with fewer tiles than there are multiprocessors.
#include "epilogue.cuh"

constexpr int ROWS = 128, COLUMNS = 256, DEPTH = 128 / sizeof(Element), STEP = 32 / sizeof(Element), STAGES = 4;
constexpr int CONSUMERS = 2, THREADS = 128 * (1 + CONSUMERS), CLUSTER = 2, SHARE = COLUMNS / CLUSTER, GROUP = 8;

struct Stage {
  Element a[ROWS][DEPTH], b[COLUMNS][DEPTH];
};
constexpr int WIDTH = 128 / sizeof(Output), SUMS = WIDTH / Epilogue::outputs;  // columns of a strip; sums of a lane for it
constexpr int STRIPS = COLUMNS / 2 / SUMS, BUFFERS = STRIPS > 1 ? 2 : 1;
typedef Output Strip[16][WIDTH];  // a warp's rows
struct Shared {
  Stage stages[STAGES];
  Strip out[CONSUMERS * 4][BUFFERS];
  Mbarrier full[STAGES], empty[STAGES];
};

struct Ring {  // a stage, and the parity of its phase
  int at = 0, phase = 0;
  __device__ void next() {
    at = (at + 1) % STAGES;
    phase ^= at == 0;
  }
};

struct Walk {  // as in rung 13
  int work, stride, rows, columns;

  __device__ Walk(int m, int n)
      : work(blockIdx.x / CLUSTER), stride(gridDim.x / CLUSTER), rows((m + CLUSTER * ROWS - 1) / (CLUSTER * ROWS)),
        columns((n + COLUMNS - 1) / COLUMNS) {}
  __device__ bool more() const { return work < rows * columns; }
  __device__ void next() { work += stride; }
  __device__ int group_row() const { return work / (GROUP * columns) * GROUP; }
  __device__ int group_size() const { return min(rows - group_row(), GROUP); }
  __device__ int first_row() const {
    int row = group_row() + work % (GROUP * columns) % group_size();
    return (row * CLUSTER + (int)cluster_rank()) * ROWS;
  }
  __device__ int first_column() const { return work % (GROUP * columns) / group_size() * COLUMNS; }
};

__device__ __forceinline__ void produce(Shared &shared, const TensorMap &a, const TensorMap &b, Walk walk, int steps) {
  int share = cluster_rank() * SHARE;
  Ring ring;
  for (; walk.more(); walk.next()) {
    int row = walk.first_row(), column = walk.first_column() + share;
    for (int step = 0; step < steps; ++step, ring.next()) {
      Stage &stage = shared.stages[ring.at];
      Mbarrier *full = &shared.full[ring.at];
      mbarrier_wait(&shared.empty[ring.at], ring.phase ^ 1);
      mbarrier_expect(full, sizeof(Stage));
      tma_load(stage.a, a, step * DEPTH, row, full);
      tma_load_multicast(stage.b[share], b, step * DEPTH, column, full, (1 << CLUSTER) - 1);
    }
  }
}

__device__ __forceinline__ void consume(Shared &shared, int group, Ring &ring, int steps, Sum (&sum)[COLUMNS / 2]) {
  unsigned lane = threadIdx.x % 32;
  int before = 0;  // the stage whose products may still run
  for (int step = 0; step < steps; ++step, ring.next()) {
    Stage &stage = shared.stages[ring.at];
    mbarrier_wait(&shared.full[ring.at], ring.phase);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < DEPTH; d += STEP)
      wgmma_n256(Element(), sum, operand(&stage.a[group * 64][d]), operand(&stage.b[0][d]), step > 0 || d > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (lane < CLUSTER && step > 0) mbarrier_arrive(&shared.empty[before], lane);
    before = ring.at;
  }
  wgmma_wait<0>();
  if (lane < CLUSTER) mbarrier_arrive(&shared.empty[before], lane);
}

// Finish a warp's sums, whose first row and column these are, and start their copies.
__device__ __forceinline__ void store(Strip (&buffers)[BUFFERS], const TensorMap &c, int row, int column, int m, int n,
                                      const Extras &extras, const Sum (&sum)[COLUMNS / 2]) {
  int lane = threadIdx.x % 32, y = lane / 4;
  float largest[2] = {0.f, 0.f};  // of the lane's two rows
#pragma unroll
  for (int strip = 0; strip < STRIPS; ++strip) {
    Strip &out = buffers[strip % BUFFERS];
    if (lane == 0) tma_wait_read<BUFFERS - 1>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < SUMS; i += 8) {  // 16 columns of sums
      Finished pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int at = strip * SUMS + i + j * 2;
        pairs[j] = finish(sum[at], sum[at + 1], extras, row + y + j % 2 * 8, column + at / 4 * 8 + lane % 4 * 2, m, n,
                          largest[j % 2]);
      }
      if constexpr (sizeof(Output) == 2 && Epilogue::outputs == 2) {  // two pieces of 16 bytes in each row
        int to = lane % 16;                                          // the lane's row for stmatrix
        stmatrix_x4(&out[to][(i / 4 + lane / 16 ^ to % 8) * 8], reinterpret_cast<unsigned(&)[4]>(pairs));
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          int from = ((i / 4 + j / 2) * 4 + lane % 4) * sizeof(Finished);  // bytes of the row
          store_for_tma(reinterpret_cast<unsigned char *>(out[y + j % 2 * 8]) + (from ^ y << 4), pairs[j]);
        }
      }
    }
    fence_for_tma();
    __syncwarp();
    if (lane == 0) {
      tma_store(c, out, column / 2 * Epilogue::outputs + strip * WIDTH, row);
      tma_commit();
    }
  }
  for (int i = 0; i < 2; ++i) reduce(extras, largest[i], row + y + i * 8, m);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap c, int m,
     int n, int k, const __grid_constant__ Extras extras) {
  Shared &shared = *reinterpret_cast<Shared *>(dynamic_shared());
  int role = threadIdx.x / 128, warp = threadIdx.x / 32, steps = (k + DEPTH - 1) / DEPTH;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(&shared.full[i], 1);
      mbarrier_init(&shared.empty[i], CONSUMERS * 4 * CLUSTER);
    }
    fence_mbarrier_init();
  }
  cluster_sync();
  if (role == CONSUMERS) {
    give_registers<40>();
    if (threadIdx.x % 128 == 0) produce(shared, a, b, Walk(m, n), steps);
  } else {
    take_registers<232>();
    Sum sum[COLUMNS / 2];
    Ring ring;
    for (Walk walk(m, n); walk.more(); walk.next()) {
      consume(shared, role, ring, steps, sum);
      store(shared.out[warp], c, walk.first_row() + warp * 16, walk.first_column(), m, n, extras, sum);
    }
    if (threadIdx.x % 32 == 0) tma_wait_read<0>();  // shared memory lives until the last stores have read it
  }
  cluster_sync();  // no block leaves while the other may still write to it
}
