// Norms 5. Rows ahead: cp.async brings the next rows while one is worked on; with clusters, rows of any length.
//
// Idea      Blocks stay and walk over rows, so weight and bias are read once and stay in registers. AHEAD rows are on their way
//           into shared memory by cp.async, so loads never pause; with -DAHEAD=0 a row is loaded when its turn comes
//           (`synchronous`). With -DCLUSTER the blocks of a cluster divide a row, and give one another their moments by
//           distributed shared memory: 12 bytes and one barrier of the cluster a row (`cluster`).
// Bytes     4 a number.
// Limit     Memory.
#include "rows.cuh"

#ifndef RMS
#define RMS 0
#endif
#if RMS
typedef Sum Statistic;
#else
typedef Moments Statistic;
#endif

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, AHEAD ? 1024 / THREADS : 1)
norms(const Element *x, const Element *weight, const Element *bias, Element *y, int rows, int columns, float epsilon) {
  int rank = CLUSTER > 1 ? cluster_rank() : 0, width = columns / 8;
  Vector by[VECTORS], plus[RMS ? 1 : VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    int at = vector_at<VECTORS>(v, rank);
    if (at < width) by[v] = reinterpret_cast<const Vector *>(weight)[at];
    if (at < width && !RMS) plus[RMS ? 0 : v] = reinterpret_cast<const Vector *>(bias)[at];
  }
  auto statistic = [&](auto &own) -> Statistic {
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
  };
  auto finish = [&](int row, const auto &own, Statistic all) {
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
  };
  walk_rows<VECTORS, CLUSTER, AHEAD, Statistic>(x, rows, columns, statistic, finish);
}
