// What memory-bound kernels share: statistics of a row that lanes, warps and the blocks of a cluster merge, and a walk over
// rows that come by cp.async while others are worked on.
#pragma once
#include "ptx.cuh"

constexpr float LOG2_E = 1.44269504f, LOWEST = -3.402823466e38f;

__device__ __forceinline__ float sigmoid(float x) { return inverse(1 + power_of_2(-LOG2_E * x)); }

// ---- Words of shared memory, whose banks the emulator counts ------------------------------------------------------

__device__ __forceinline__ float load_word(const float *from) {
  PTX(, emulator::count_banks(from, 4);)
  return *from;
}

__device__ __forceinline__ void store_vector(float4 *to, const float4 &value) {
  PTX(, emulator::count_banks(to, 16);)
  *to = value;
}

#ifndef __CUDACC__
inline float atomicAdd(float *to, float value) {
  float before = *to;
  *to += value;
  return before;
}
#endif

// ---- Statistics: none() changes nothing, with() merges two, of_lane() is another lane's, words() travel. -------------

struct Sum {
  float value;
  static __device__ __forceinline__ Sum none() { return {0}; }
  __device__ __forceinline__ Sum with(Sum other) const { return {value + other.value}; }
  __device__ __forceinline__ float4 words() const { return make_float4(value, 0, 0, 0); }
  static __device__ __forceinline__ Sum of(float4 words) { return {words.x}; }
  __device__ __forceinline__ Sum of_lane(int mask) const { return {__shfl_xor_sync(~0u, value, mask)}; }
};

struct Largest {
  float value;
  static __device__ __forceinline__ Largest none() { return {LOWEST}; }
  __device__ __forceinline__ Largest with(Largest other) const { return {fmaxf(value, other.value)}; }
  __device__ __forceinline__ Largest of_lane(int mask) const { return {__shfl_xor_sync(~0u, value, mask)}; }
};

// The largest logarithm (base 2) of some numbers, and their sum over that largest one: the online softmax.
struct Exponentials {
  float largest, sum;
  static __device__ __forceinline__ Exponentials none() { return {LOWEST, 0}; }
  __device__ __forceinline__ Exponentials with(Exponentials other) const {
    float top = fmaxf(largest, other.largest);
    return {top, sum * power_of_2(largest - top) + other.sum * power_of_2(other.largest - top)};
  }
  __device__ __forceinline__ float4 words() const { return make_float4(largest, sum, 0, 0); }
  static __device__ __forceinline__ Exponentials of(float4 words) { return {words.x, words.y}; }
  __device__ __forceinline__ Exponentials of_lane(int mask) const {
    return {__shfl_xor_sync(~0u, largest, mask), __shfl_xor_sync(~0u, sum, mask)};
  }
};

// Count, mean, and the sum of squared distances from the mean: Welford's, which Chan, Golub and LeVeque merge.
struct Moments {
  float count, mean, squares;
  static __device__ __forceinline__ Moments none() { return {0, 0, 0}; }
  __device__ __forceinline__ Moments with(Moments other) const {
    float all = count + other.count, share = all > 0 ? other.count * inverse(all) : 0, apart = other.mean - mean;
    return {all, mean + apart * share, squares + other.squares + apart * apart * count * share};
  }
  __device__ __forceinline__ float4 words() const { return make_float4(count, mean, squares, 0); }
  static __device__ __forceinline__ Moments of(float4 words) { return {words.x, words.y, words.z}; }
  __device__ __forceinline__ Moments of_lane(int mask) const {
    return {__shfl_xor_sync(~0u, count, mask), __shfl_xor_sync(~0u, mean, mask), __shfl_xor_sync(~0u, squares, mask)};
  }
};

// ---- Merges. All threads get the result. -----------------------------------------------------------------------------

template <class S> __device__ __forceinline__ S over_warp(S own) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) own = own.with(own.of_lane(mask));
  return own;
}

// A block's rows lie along y: one, or several of one warp each. `slots` are 32 in shared memory, used by no other call up
// to the next barrier of the block but one.
template <class S> __device__ __forceinline__ S over_block(S own, S *slots) {
  own = over_warp(own);
  if (blockDim.x == 32) return own;
  int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (lane == 0) slots[threadIdx.x / 32] = own;
  __syncthreads();
  return over_warp(lane < warps ? slots[lane] : S::none());
}

// By a tree in shared memory, as it was done before there were shuffles. `slots`: one for each of the block's threads.
template <class S> __device__ __forceinline__ S by_tree(S own, S *slots) {
  slots[threadIdx.x] = own;
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) slots[threadIdx.x] = slots[threadIdx.x].with(slots[threadIdx.x + half]);
  }
  __syncthreads();
  own = slots[0];
  __syncthreads();  // slots may be written again
  return own;
}

// What the blocks of a cluster give one another: at the same place of each one's dynamic shared memory. They take turns, so
// that what comes early for the next row finds a place that nobody reads.
struct ClusterSlots {
  float4 words[2][32];
  Mbarrier barriers[2];

  // Call it before over_cluster, by all threads; a barrier of the cluster must follow.
  __device__ __forceinline__ void begin() {
    if (threadIdx.x == 0) {
      mbarrier_init(&barriers[0], 1);
      mbarrier_init(&barriers[1], 1);
      fence_mbarrier_init();
    }
  }
};

// All blocks of the cluster give their threads' common statistic to all. The first warp sends it (st.async) with the bytes
// counted at the receiver's mbarrier: a barrier of the cluster would wait until the whole GPU sees the rows that were stored.
template <int BLOCKS, class S> __device__ __forceinline__ S over_cluster(S own, ClusterSlots *slots, int turn) {
  if (BLOCKS == 1) return own;
  constexpr int COPIES = 32 / BLOCKS;  // all lanes send, so each block gets some copies
  int lane = threadIdx.x % 32, at = turn % 2;
  if (threadIdx.x < 32) {
    if (lane == 0) mbarrier_expect(&slots->barriers[at], 32 * 16);
    int to = cluster_rank() * COPIES + lane / BLOCKS;
    store_async(&slots->words[at][to], own.words(), &slots->barriers[at], lane % BLOCKS);
  }
  mbarrier_wait_cluster(&slots->barriers[at], turn / 2 % 2);
  return over_warp(lane < BLOCKS ? S::of(slots->words[at][lane * COPIES]) : S::none());
}

// ---- Rows of numbers of 16 bits, in vectors of 16 bytes ---------------------------------------------------------------

template <class F> __device__ __forceinline__ Vector each_number(const Vector &x, F change) {
  Vector y;
#pragma unroll
  for (int i = 0; i < 8; ++i) round_to(y.at[i], change(to_float(x.at[i]), i));
  return y;
}

// Let the compiler forget where vectors came from. Else it keeps each number as the float that it was widened to, in twice the
// registers, from one pass over a row to the next.
template <int OWN> __device__ __forceinline__ void stay_narrow(Vector (&own)[OWN]) {
#ifdef __CUDACC__
#pragma unroll
  for (int v = 0; v < OWN; ++v) {
    unsigned *words = reinterpret_cast<unsigned *>(&own[v]);
    asm volatile("" : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3]));
  }
#endif
}

// Where a thread's vectors of a row lie: a block has a stretch of the row, and each of its loads is of neighbours.
template <int OWN> __device__ __forceinline__ int vector_at(int v, int rank) {
  return (rank * OWN + v) * blockDim.x + threadIdx.x;
}

// A thread's vectors of a row: in registers, or in shared memory, from where each pass reads them anew.
// known: those that exist.
template <int OWN, bool SHARED> struct RowPart {
  int known;
  Vector held[SHARED ? 1 : OWN];
  const Vector *first;
  int pitch;
  __device__ __forceinline__ Vector operator[](int v) const { return SHARED ? first[v * pitch] : held[SHARED ? 0 : v]; }
  __device__ __forceinline__ void next_pass() {
#ifdef __CUDACC__
    if (SHARED) asm volatile("" ::: "memory");
#endif
    if (!SHARED) stay_narrow(held);
  }
};

// Walk over rows by blocks (or clusters) that stay. `statistic` makes a thread's own from its part of the row; `finish` gets the row, the part and the statistic of the whole row.
// LEAD: so many rows are on their way by cp.async while one is worked on (0: a row is loaded when its turn comes).
template <int OWN, int BLOCKS, int LEAD, class S, class Statistic, class Finish>
__device__ __forceinline__ void walk_rows(const Element *x, int rows, int columns, Statistic statistic, Finish finish) {
  auto *slots = reinterpret_cast<ClusterSlots *>(dynamic_shared());
  auto *warps = reinterpret_cast<S *>(slots + 1);
  auto *stages = reinterpret_cast<Vector *>(warps + 64);
  int threads = blockDim.x * blockDim.y, self = threadIdx.y * blockDim.x + threadIdx.x;
  int rank = BLOCKS > 1 ? cluster_rank() : 0, step = gridDim.x / BLOCKS * blockDim.y, width = columns / 8;
  int known = 0;
#pragma unroll
  for (int v = 0; v < OWN; ++v) known += vector_at<OWN>(v, rank) < width;
  auto start = [&](int row, int stage) {
    const Element *from = x + (size_t)row * columns + vector_at<OWN>(0, rank) * 8;
#pragma unroll
    for (int v = 0; v < OWN; ++v) {
      bool inside = row < rows && v < known;
      cp_async_16(&stages[(stage * OWN + v) * threads + self], inside ? from + v * blockDim.x * 8 : x, inside);
    }
    cp_async_commit();
  };
  if (BLOCKS > 1) {
    slots->begin();
    cluster_sync();  // all blocks have begun, and may be written to
  }
  int row = blockIdx.x / BLOCKS * blockDim.y + threadIdx.y;
  for (int stage = 0; stage < LEAD; ++stage) start(row + stage * step, stage);
  for (int turn = 0; row < rows; ++turn, row += step) {
    RowPart<OWN, (LEAD > 0)> own;
    own.known = known;
    if (LEAD) {
      start(row + LEAD * step, (turn + LEAD) % (LEAD + 1));  // this thread alone reads what it copies: no barrier
      cp_async_wait<LEAD>();
      own.first = &stages[turn % (LEAD + 1) * OWN * threads + self];
      own.pitch = threads;
    } else {
#pragma unroll
      for (int v = 0; v < OWN; ++v) {
        Vector &vector = own.held[LEAD ? 0 : v];
        vector = {};
        const Element *from = x + (size_t)row * columns + vector_at<OWN>(v, rank) * 8;
        if (v < known) vector = *reinterpret_cast<const Vector *>(from);
      }
    }
    S found = over_block(statistic(own), warps + turn % 2 * 32);
    own.next_pass();
    finish(row, own, over_cluster<BLOCKS>(found, slots, turn));
  }
  cp_async_wait<0>();
}
