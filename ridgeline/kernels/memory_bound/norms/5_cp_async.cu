// Norms 5. Rows ahead: cp.async brings the next row while one is worked on.
//
// Idea      Blocks stay and walk over rows, so weight and bias are read once and stay in registers. A thread starts the copies
//           of its part of the next row into shared memory, and waits for the part it works on: it reads what it copied itself,
//           so there is no barrier. -DAHEAD=0 loads a row when its turn comes (`synchronous`). With -DCLUSTER=2 and more, which
//           is rung 7, the blocks of a cluster share rows out, as in rung 6: long rows of weight and bias stay in registers too.
// Bytes     4 a number.
// Limit     Waiting: a block has one row under way, and its threads stand still at a barrier in each row. Where a row is
//           short, the blocks of rung 3 hide that better: as many as fit come and go, each at another place.
#include "rows.cuh"

#ifndef RMS
#define RMS 0
#endif
#ifndef CLUSTER
#define CLUSTER 1
#endif
#if RMS
typedef Sum Statistic;
#else
typedef Moments Statistic;
#endif

// A thread's vectors of a row: in registers, or in shared memory, from where each pass reads them anew. known: those that
// exist.
struct RowPart {
  Vector held[AHEAD ? 1 : VECTORS];
  const Vector *first;
  int known;
  __device__ __forceinline__ Vector operator[](int v) const {
    return AHEAD ? first[v * blockDim.x * blockDim.y] : held[AHEAD ? 0 : v];
  }
  __device__ __forceinline__ void next_pass() {
#ifdef __CUDACC__
    if (AHEAD) asm volatile("" ::: "memory");
#endif
    if (!AHEAD) stay_narrow(held);
  }
};

__device__ __forceinline__ Statistic statistic_of(RowPart &own) {
  float sum = 0, squares = 0;
#if !RMS
#pragma unroll(AHEAD ? 1 : VECTORS)
  for (int v = 0; v < VECTORS; ++v) {
    Vector part = own[v];  // one that does not exist is zeros
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += to_float(part.at[i]);
  }
  own.next_pass();
#endif
  float mean = own.known ? sum * inverse(8 * own.known) : 0;
#pragma unroll(AHEAD ? 1 : VECTORS)
  for (int v = 0; v < VECTORS; ++v) {
    Vector part = own[v];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float apart = v < own.known ? to_float(part.at[i]) - mean : 0;
      squares += apart * apart;
    }
  }
#if RMS
  return {squares};
#else
  return {8.f * own.known, mean, squares};
#endif
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS, AHEAD ? 1024 / THREADS : 1)
norms(const Element *x, const Element *weight, const Element *bias, Element *y, int rows, int columns, float epsilon) {
  auto *stages = reinterpret_cast<Vector *>(dynamic_shared());
  auto *mail = reinterpret_cast<ClusterMail<1> *>(&stages[(AHEAD + 1) * VECTORS * blockDim.x * blockDim.y]);
  __shared__ Statistic slots[2][32];
  int threads = blockDim.x * blockDim.y, self = threadIdx.y * blockDim.x + threadIdx.x;
  int step = gridDim.x / CLUSTER * blockDim.y, width = columns / 8, rank = CLUSTER > 1 ? cluster_rank() : 0;
  if (CLUSTER > 1) {
    mail[0].begin();
    mail[1].begin();
    cluster_arrive();
  }
  RowPart own;
  own.known = 0;
  Vector by[VECTORS], plus[RMS ? 1 : VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    int at = vector_at<VECTORS>(v, rank);
    if (at >= width) continue;
    ++own.known;
    by[v] = reinterpret_cast<const Vector *>(weight)[at];
    if (!RMS) plus[RMS ? 0 : v] = reinterpret_cast<const Vector *>(bias)[at];
  }
  auto start = [&](int row, int stage) {
    const Element *from = x + (size_t)row * columns + vector_at<VECTORS>(0, rank) * 8;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      bool inside = row < rows && v < own.known;
      cp_async_16(&stages[(stage * VECTORS + v) * threads + self], inside ? from + v * blockDim.x * 8 : x, inside);
    }
    cp_async_commit();
  };
  int row = blockIdx.x / CLUSTER * blockDim.y + threadIdx.y;
  for (int stage = 0; stage < AHEAD; ++stage) start(row + stage * step, stage);
  if (CLUSTER > 1) cluster_wait();
  for (int turn = 0; row < rows; ++turn, row += step) {
    if (AHEAD) {
      start(row + AHEAD * step, (turn + AHEAD) % (AHEAD + 1));
      cp_async_wait<AHEAD>();
      own.first = &stages[turn % (AHEAD + 1) * VECTORS * threads + self];
    } else {
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        Vector &vector = own.held[AHEAD ? 0 : v];
        vector = {};
        if (v < own.known) vector = load_once(x + (size_t)row * columns + vector_at<VECTORS>(v, rank) * 8);
      }
    }
    Statistic all = over_block(statistic_of(own), slots[turn % 2]);
    if (CLUSTER > 1) {
      Statistic one[1] = {all};
      over_cluster<CLUSTER>(one, &mail[turn % 2], turn / 2);
      if (threadIdx.x == 0) mail[turn % 2].again();
      all = one[0];
    }
    own.next_pass();
#if RMS
    float mean = 0, scale = inverse_root(all.value / columns + epsilon);
#else
    float mean = all.mean, scale = inverse_root(all.squares / columns + epsilon);
#endif
    Element *to = y + (size_t)row * columns + vector_at<VECTORS>(0, rank) * 8;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      stay_narrow(by);  // for all rows, in half of the registers
      stay_narrow(plus);
      if (v < own.known)
        *reinterpret_cast<Vector *>(to + v * blockDim.x * 8) = each_number(own[v], [&](float z, int i) {
          return (z - mean) * scale * to_float(by[v].at[i]) + (RMS ? 0 : to_float(plus[RMS ? 0 : v].at[i]));
        });
    }
  }
  cp_async_wait<0>();
}
