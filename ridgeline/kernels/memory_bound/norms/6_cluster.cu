// Norms 6. Clusters: several blocks have a row, so rows of any length stay in registers.
//
// Idea      Each block of a cluster loads its part of ROWS rows, and makes its own count, mean and squares. They reach the other
//           blocks by distributed shared memory: 16 bytes a row and block (st.async), and one mbarrier that counts them. Blocks
//           stay small, so that a multiprocessor has several, of which some load while others compute.
// Bytes     4 a number; weight and bias from L1 or L2 once for ROWS rows.
// Limit     Memory; for LayerNorm of long rows L2, which gives weight and bias besides.
#include "rows.cuh"

#ifndef RMS
#define RMS 0
#endif

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1024 / THREADS)
norms(const Element *x, const Element *weight, const Element *bias, Element *y, int rows, int columns, float epsilon) {
  auto *mail = reinterpret_cast<ClusterMail<ROWS> *>(dynamic_shared());
  auto *slots = reinterpret_cast<Moments(*)[32]>(mail + 1);
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
  Moments all[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float sum = 0, squares = 0;
    if (!RMS)
#pragma unroll
      for (int v = 0; v < VECTORS; ++v)
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += to_float(own[r][v].at[i]);
    stay_narrow(own[r]);
    float mean = known ? sum * inverse(8 * known) : 0;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float apart = v < known ? to_float(own[r][v].at[i]) - mean : 0;
        squares += apart * apart;
      }
    all[r] = {8.f * known, mean, squares};
    stay_narrow(own[r]);
  }
  over_block(all, slots);
  cluster_wait();
  over_cluster<CLUSTER>(all, mail);
  float scale[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) scale[r] = inverse_root(all[r].squares / columns + epsilon);
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    int at = vector_at<VECTORS>(v, rank);
    if (at >= width) continue;
    Vector by = reinterpret_cast<const Vector *>(weight)[at], plus = {};
    if (!RMS) plus = reinterpret_cast<const Vector *>(bias)[at];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      if (first + r < rows)
        *reinterpret_cast<Vector *>(y + (size_t)(first + r) * columns + at * 8) =
            each_number(own[r][v], [&](float z, int i) {
              return (z - all[r].mean) * scale[r] * to_float(by.at[i]) + (RMS ? 0 : to_float(plus.at[i]));
            });
  }
}
