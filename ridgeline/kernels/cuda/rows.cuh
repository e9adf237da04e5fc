// What memory-bound kernels share: statistics of a row that lanes, warps and the blocks of a cluster merge.
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

// ---- A barrier of the cluster in two halves: nothing that was stored before is waited for -----------------------------

__device__ __forceinline__ void cluster_arrive() {
  PTX(asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"), );
}
__device__ __forceinline__ void cluster_wait() {  // in the emulator it is the whole barrier
  PTX(asm volatile("barrier.cluster.wait.aligned;" ::: "memory"),
      emulator::meet(emulator::cluster_barrier, unsigned(emulator::blocks.size() * emulator::blocks[0].threads.size()),
                     "barrier.cluster"));
}

// ---- Merges. All threads get the result. -----------------------------------------------------------------------------

template <class S> __device__ __forceinline__ S over_warp(S own) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) own = own.with(own.of_lane(mask));
  return own;
}

// The mean of all first, and then each lane's squares about it: merged in pairs, each of five steps would divide.
template <> __device__ __forceinline__ Moments over_warp(Moments own) {
  float count = over_warp(Sum{own.count}).value, sum = over_warp(Sum{own.count * own.mean}).value;
  float mean = count > 0 ? sum * inverse(count) : 0, apart = own.mean - mean;
  return {count, mean, over_warp(Sum{own.squares + own.count * apart * apart}).value};
}

// A block's threads have a part of each of COUNT rows; what lies along y are other rows, of one warp each. `slots`: 32 for
// each row in shared memory, used by no other call up to the next barrier of the block but one.
template <int COUNT, class S> __device__ __forceinline__ void over_block(S (&own)[COUNT], S (*slots)[32]) {
#pragma unroll
  for (int r = 0; r < COUNT; ++r) own[r] = over_warp(own[r]);
  if (blockDim.x == 32) return;
  int lane = threadIdx.x % 32, warps = blockDim.x / 32;
#pragma unroll
  for (int r = 0; r < COUNT; ++r)
    if (lane == 0) slots[r][threadIdx.x / 32] = own[r];
  __syncthreads();
#pragma unroll
  for (int r = 0; r < COUNT; ++r) own[r] = over_warp(lane < warps ? slots[r][lane] : S::none());
}

template <class S> __device__ __forceinline__ S over_block(S own, S (&slots)[32]) {
  S one[1] = {own};
  over_block<1>(one, &slots);
  return one[0];
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

// What the blocks of a cluster send one another, in the dynamic shared memory of each. All lanes of a warp send, so there are
// copies, and 512 bytes for each row whatever the cluster.
template <int COUNT> struct ClusterMail {
  float4 words[COUNT][32];
  Mbarrier barrier;

  // Get ready to receive. Who sends waits for the cluster before; between cluster_arrive and cluster_wait loads can start.
  __device__ __forceinline__ void begin() {
    if (threadIdx.x == 0) {
      mbarrier_init(&barrier, 1);
      fence_mbarrier_init();
      again();
    }
    __syncwarp();
  }
  __device__ __forceinline__ void again() { mbarrier_expect(&barrier, COUNT * 32 * 16); }  // by one thread
};

// All blocks of the cluster give their threads' common statistics to all. The first warp sends them by st.async, whose bytes
// the receiver's mbarrier counts. A barrier of the cluster would do too, but it would wait until the whole GPU sees all that
// the block has stored.
//
// turn: how often this mail was received in before. Blocks that stay take two mails by turns: who sends the next has read the
// last, so the one before it is free.
template <int BLOCKS, int COUNT, class S>
__device__ __forceinline__ void over_cluster(S (&own)[COUNT], ClusterMail<COUNT> *mail, int turn = 0) {
  constexpr int COPIES = 32 / BLOCKS;
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < COUNT; ++r)
    if (threadIdx.x < 32)
      store_async(&mail->words[r][cluster_rank() * COPIES + lane / BLOCKS], own[r].words(), &mail->barrier, lane % BLOCKS);
  mbarrier_wait_cluster(&mail->barrier, turn % 2);
#pragma unroll
  for (int r = 0; r < COUNT; ++r) own[r] = over_warp(lane < BLOCKS ? S::of(mail->words[r][lane * COPIES]) : S::none());
}

// ---- Rows of numbers of 16 bits, in vectors of 16 bytes ---------------------------------------------------------------

// 16 bytes that are read once: L1 keeps what is read again, such as weights, in their place.
__device__ __forceinline__ Vector load_once(const Element *from) {
#ifdef __CUDACC__
  uint4 words;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
      : "l"(from));
  return *reinterpret_cast<Vector *>(&words);
#else
  return *reinterpret_cast<const Vector *>(from);
#endif
}

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
