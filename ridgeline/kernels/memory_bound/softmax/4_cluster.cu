// Softmax 4. Rows ahead, by clusters: no pauses, and rows of any length.
//
// Idea      Blocks stay and walk over rows: cp.async brings the next ones into shared memory while one is worked on, so loads
//           never pause. The blocks of a cluster divide a row, and give one another their largest and sum by distributed shared
//           memory: 8 bytes and one barrier of the cluster a row, however long it is.
// Bytes     4 a number.
// Limit     Memory.
#include "rows.cuh"

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1024 / THREADS)
softmax(const Element *x, Element *y, int rows, int columns) {
  int rank = CLUSTER > 1 ? cluster_rank() : 0;
  auto statistic = [&](auto &own) {
    Exponentials all = Exponentials::none();
#pragma unroll(AHEAD ? 1 : VECTORS)
    for (int v = 0; v < VECTORS; ++v) {
      Vector part = own[v];
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (v < own.known) all.largest = fmaxf(all.largest, to_float(part.at[i]) * LOG2_E);
    }
    own.next_pass();
#pragma unroll(AHEAD ? 1 : VECTORS)
    for (int v = 0; v < VECTORS; ++v) {
      Vector part = own[v];
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (v < own.known) all.sum += power_of_2(to_float(part.at[i]) * LOG2_E - all.largest);
    }
    return all;
  };
  auto finish = [&](int row, const auto &own, Exponentials all) {
    float share = inverse(all.sum);
    Element *to = y + (size_t)row * columns + vector_at<VECTORS>(0, rank) * 8;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
      if (v < own.known)
        *reinterpret_cast<Vector *>(to + v * blockDim.x * 8) =
            each_number(own[v], [&](float z, int) { return power_of_2(z * LOG2_E - all.largest) * share; });
  };
  walk_rows<VECTORS, CLUSTER, AHEAD, Exponentials>(x, rows, columns, statistic, finish);
}
