// Softmax 4. Clusters: several blocks have a row, so rows of any length stay in registers.
//
// Idea      Each block of a cluster loads its part of a row, and makes its own largest and sum. They reach the other blocks by
//           distributed shared memory: 16 bytes a row and block (st.async), and one mbarrier that counts them. Blocks stay small,
//           so that a multiprocessor has several, of which some load while others compute.
// Bytes     4 a number.
// Limit     Memory.
#include "rows.cuh"

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1024 / THREADS)
softmax(const Element *x, Element *y, int rows, int columns) {
  auto *mail = reinterpret_cast<ClusterMail<ROWS> *>(dynamic_shared());
  auto *slots = reinterpret_cast<Exponentials(*)[32]>(mail + 1);
  int rank = cluster_rank(), first = blockIdx.x / CLUSTER * ROWS, width = columns / 8, known = 0;
  mail->begin();
  cluster_arrive();
  Vector own[ROWS][VECTORS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      int at = vector_at<VECTORS>(v, rank);
      own[r][v] = {};
      if (at < width && first + r < rows) own[r][v] = load_once(x + (size_t)(first + r) * columns + at * 8);
      known += r == 0 && at < width;
    }
  Exponentials all[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    all[r] = Exponentials::none();
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (v < known) all[r].largest = fmaxf(all[r].largest, to_float(own[r][v].at[i]) * LOG2_E);
    stay_narrow(own[r]);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (v < known) all[r].sum += power_of_2(to_float(own[r][v].at[i]) * LOG2_E - all[r].largest);
    stay_narrow(own[r]);
  }
  over_block(all, slots);
  cluster_wait();
  over_cluster<CLUSTER>(all, mail);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float share = inverse(all[r].sum);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
      if (v < known && first + r < rows)
        *reinterpret_cast<Vector *>(y + (size_t)(first + r) * columns + vector_at<VECTORS>(v, rank) * 8) =
            each_number(own[r][v], [&](float z, int) { return power_of_2(z * LOG2_E - all[r].largest) * share; });
  }
}
