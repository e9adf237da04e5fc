// Instructions that CUDA C++ has no words for, each a small function with two bodies: PTX on a GPU, and what the PTX ISA
// says it does in the emulator. Rungs call these, so that the same file runs on both.
#pragma once
#include "numbers.cuh"

#ifdef __CUDACC__
#define PTX(on_gpu, emulated) on_gpu
#else
#define PTX(on_gpu, emulated) emulated
#endif

// ---- Shared memory: its 32 banks are 4 bytes wide. The emulator counts what meets in one bank. ----------------------

__device__ __forceinline__ float4 load_shared(const float *from) {
  PTX(, emulator::count_banks(from, 16);)
  return *reinterpret_cast<const float4 *>(from);
}

__device__ __forceinline__ void store_shared(float *to, float value) {
  PTX(, emulator::count_banks(to, 4);)
  *to = value;
}

__device__ __forceinline__ unsigned shared_address(const void *pointer) {
  return PTX((unsigned)__cvta_generic_to_shared(pointer), emulator::address_of(pointer));
}

// The block's dynamic shared memory, at a multiple of 1,024 bytes.
__device__ __forceinline__ unsigned char *dynamic_shared() {
#ifdef __CUDACC__
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
#else
  return emulator::current->block->dynamic;
#endif
}

// ---- cp.async (sm_80): 16 bytes from global to shared memory, past the registers. ------------------------------------
// Rows that do not exist (inside = false) become zeros, and nothing is read at `from`.

__device__ __forceinline__ void cp_async_16(void *to, const void *from, bool inside) {
#ifdef __CUDACC__
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(inside ? 16 : 0)
               : "memory");
#else
  emulator::require(emulator::address_of(to) % 16 == 0, "cp.async writes to addresses that are multiples of 16 bytes");
  emulator::require(uintptr_t(from) % 16 == 0, "cp.async reads from addresses that are multiples of 16 bytes");
  memset(to, 0xff, 16);
  emulator::current->copies.back().push_back({to, from, 16, inside ? 16u : 0u});
#endif
}

__device__ __forceinline__ void cp_async_commit() {
  PTX(asm volatile("cp.async.commit_group;" ::: "memory"), emulator::current->copies.push_back({}));
}

// Wait until at most N of this thread's groups are on their way. Other threads see the bytes after a barrier.
template <int N> __device__ __forceinline__ void cp_async_wait() {
#ifdef __CUDACC__
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#else
  auto &groups = emulator::current->copies;
  while (groups.size() > N + 1) {
    for (const emulator::Copy &copy : groups[0]) {
      memset(copy.to, 0, copy.bytes);
      memcpy(copy.to, copy.from, copy.kept);
    }
    groups.erase(groups.begin());
  }
#endif
}

// ---- ldmatrix and mma.sync (sm_80) ----------------------------------------------------------------------------------

// Load four matrices of 8 x 8 numbers of 16 bits. Lane 8 i + j gives the address of row j of matrix i, and receives in
// r[i] the numbers 2 (lane % 4) and 2 (lane % 4) + 1 of row lane / 4.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void *row) {
#ifdef __CUDACC__
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
#else
  emulator::Ldmatrix own{r, row};
  emulator::together("ldmatrix", &own, emulator::run_ldmatrix);
#endif
}

// d[16, 8] += a[16, 16] · b[16, 8] by a warp; a is row-major, b column-major.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned *b) {
#ifdef __CUDACC__
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  emulator::Mma own{d, a, b};
  emulator::together("mma.m16n8k16", &own, emulator::run_mma);
#endif
}

// ---- Approximations, to 2 units in the last place or so, without the cases that are not normal numbers ----------------

__device__ __forceinline__ float power_of_2(float x) {
#ifdef __CUDACC__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

__device__ __forceinline__ float inverse(float x) {
#ifdef __CUDACC__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.f / x;
#endif
}

__device__ __forceinline__ float inverse_root(float x) {
#ifdef __CUDACC__
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.f / sqrtf(x);
#endif
}

// ---- mbarrier (sm_90): threads arrive, copies bring bytes; a phase ends when all have come ---------------------------

typedef unsigned long long Mbarrier;  // 8 bytes of shared memory

__device__ __forceinline__ void mbarrier_init(Mbarrier *barrier, int count) {
  PTX(asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory"),
      emulator::init(shared_address(barrier), count));
}

// Make initialized barriers known to TMA and to the cluster. A barrier of the threads must follow.
__device__ __forceinline__ void fence_mbarrier_init() {
  PTX(asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"), );
}

// Arrive, and say how many bytes the phase waits for besides.
__device__ __forceinline__ void mbarrier_expect(Mbarrier *barrier, int bytes) {
  PTX(asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                   : "memory"),
      emulator::arrive(shared_address(barrier), bytes));
}

__device__ __forceinline__ void mbarrier_arrive(Mbarrier *barrier) {
  PTX(asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory"),
      emulator::arrive(shared_address(barrier), 0));
}

// Arrive at the barrier that lies at this place in another block of the cluster. It is for stages that were read: with
// .release.cluster it would wait until the whole GPU sees all that the thread wrote (MEMBAR.ALL.GPU), once a step.
__device__ __forceinline__ void mbarrier_arrive(Mbarrier *barrier, unsigned rank) {
#ifdef __CUDACC__
  asm volatile("{\n.reg .b32 there;\n"
               "mapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)),
               "r"(rank)
               : "memory");
#else
  emulator::arrive(shared_address(barrier) | (rank + 1) << emulator::REMOTE, 0);
#endif
}

// Wait until the phase of this parity has ended: 0, 1, 0, ... A new barrier is in phase 0, as if a phase 1 had ended.
__device__ __forceinline__ void mbarrier_wait(Mbarrier *barrier, int parity) {
#ifdef __CUDACC__
  asm volatile("{\n.reg .pred done;\n"
               "again:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@done bra ended;\n"
               "bra again;\n"
               "ended:\n}" ::"r"(shared_address(barrier)),
               "r"(parity)
               : "memory");
#else
  unsigned address = shared_address(barrier);
  emulator::block_until("mbarrier", [&] { return emulator::barrier_at(address).phase != unsigned(parity); });
#endif
}

// ---- TMA (sm_90): one thread starts the copy of a box of a matrix ----------------------------------------------------
// The box is written in rows of 128 bytes whose 16-byte pieces are exchanged (piece ^ row % 8). What lies outside the
// matrix becomes zeros, and counts as bytes that came.

#ifdef __CUDACC__
struct __align__(64) TensorMap {
  unsigned long long opaque[16];
};
#else
typedef emulator::Map TensorMap;
#endif

__device__ __forceinline__ void tma_load(void *to, const TensorMap &map, int column, int row, Mbarrier *barrier) {
#ifdef __CUDACC__
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)), "r"(column), "r"(row)
               : "memory");
#else
  emulator::start({map, column, row, shared_address(to), shared_address(barrier), 1u << emulator::current->block->rank});
#endif
}

// The same into every block of `mask`, at the same place, and for the barrier at the same place.
__device__ __forceinline__ void tma_load_multicast(void *to, const TensorMap &map, int column, int row,
                                                   Mbarrier *barrier, unsigned short mask) {
#ifdef __CUDACC__
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
               "[%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)),
               "r"(column), "r"(row), "h"(mask)
               : "memory");
#else
  emulator::start({map, column, row, shared_address(to), shared_address(barrier), mask});
#endif
}

// The way back: a box in shared memory, whose pieces were exchanged, into the matrix. What lies outside is left out. The
// stores of a thread up to tma_commit are a group. Those who wrote the box call fence_for_tma, and meet, before that.
__device__ __forceinline__ void fence_for_tma() {
  PTX(asm volatile("fence.proxy.async.shared::cta;" ::: "memory"), emulator::current->unfenced = false);
}

template <class T> __device__ __forceinline__ void store_for_tma(void *to, const T &value) {  // into a box
  PTX(, emulator::current->unfenced = true;)
  *static_cast<T *>(to) = value;
}

__device__ __forceinline__ void tma_store(const TensorMap &map, const void *from, int column, int row) {
#ifdef __CUDACC__
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
               "r"(shared_address(from)), "r"(column), "r"(row)
               : "memory");
#else
  emulator::start_store(map, from, column, row);
#endif
}

__device__ __forceinline__ void tma_commit() {
  PTX(asm volatile("cp.async.bulk.commit_group;" ::: "memory"), emulator::current->stores.push_back({}));
}

// Wait until all but the N last groups of this thread have read their boxes.
template <int N> __device__ __forceinline__ void tma_wait_read() {
  PTX(asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"), emulator::wait_stores(N));
}

// Store four matrices of 8 x 8 numbers of 16 bits, as ldmatrix_x4 loads them.
__device__ __forceinline__ void stmatrix_x4(void *row, const unsigned (&r)[4]) {
#ifdef __CUDACC__
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#else
  emulator::current->unfenced = true;
  emulator::Stmatrix own{r, row};
  emulator::together("stmatrix", &own, emulator::run_stmatrix);
#endif
}

// ---- Clusters (sm_90) ------------------------------------------------------------------------------------------------

__device__ __forceinline__ unsigned cluster_rank() {
#ifdef __CUDACC__
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return emulator::current->block->rank;
#endif
}

__device__ __forceinline__ void cluster_sync() {
  PTX(asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"),
      emulator::meet(emulator::cluster_barrier, unsigned(emulator::blocks.size() * emulator::blocks[0].threads.size()),
                     "barrier.cluster"));
}

// Store 16 bytes at the place of `to` in another block of the cluster, by all lanes of a warp. The barrier at the place of
// `barrier` there counts the bytes, and who waits for it by mbarrier_wait_cluster sees them.
__device__ __forceinline__ void store_async(float4 *to, const float4 &from, Mbarrier *barrier, unsigned rank) {
#ifdef __CUDACC__
  asm volatile("{\n.reg .b32 there, told;\n"
               "mapa.shared::cluster.u32 there, %0, %2;\n"
               "mapa.shared::cluster.u32 told, %1, %2;\n"
               "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [told];\n}" ::
                   "r"(shared_address(to)),
               "r"(shared_address(barrier)), "r"(rank), "f"(from.x), "f"(from.y), "f"(from.z), "f"(from.w)
               : "memory");
#else
  unsigned block = (rank + 1) << emulator::REMOTE;
  emulator::RemoteStore own{shared_address(to) | block, shared_address(barrier) | block};
  memcpy(own.words, &from, 16);
  emulator::together("st.async", &own, emulator::start_stores);
#endif
}

__device__ __forceinline__ void mbarrier_wait_cluster(Mbarrier *barrier, int parity) {
#ifdef __CUDACC__
  asm volatile("{\n.reg .pred done;\n"
               "again:\n"
               "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
               "@done bra ended;\n"
               "bra again;\n"
               "ended:\n}" ::"r"(shared_address(barrier)),
               "r"(parity)
               : "memory");
#else
  mbarrier_wait(barrier, parity);
#endif
}

// ---- Registers (sm_90a): a warpgroup gives some back, or takes some -------------------------------------------------

template <int COUNT> __device__ __forceinline__ void give_registers() {
  PTX(asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)), );
}
template <int COUNT> __device__ __forceinline__ void take_registers() {
  PTX(asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)), );
}

// A barrier of `count` threads, one of 15 besides __syncthreads.
__device__ __forceinline__ void named_barrier(int which, int count) {
  PTX(asm volatile("bar.sync %0, %1;" ::"r"(which), "r"(count) : "memory"),
      emulator::meet(emulator::current->block->barriers[which], count, "bar.sync"));
}

// ---- Bulk copies (sm_90): one thread starts the copy of bytes that lie in a row --------------------------------------
// Both addresses and the number of bytes are multiples of 16. The barrier counts the bytes.

__device__ __forceinline__ void bulk_load(void *to, const void *from, int bytes, Mbarrier *barrier) {
#ifdef __CUDACC__
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#else
  emulator::start_bulk(shared_address(to), from, unsigned(bytes), shared_address(barrier));
#endif
}

// ---- Counters in global memory, by which blocks that run at the same time tell each other what has ended --------------
// What a thread wrote before it signals, and what other threads wrote before a barrier that this thread passed, is seen
// by a thread that has waited for the counter, and by others behind a barrier with that one.

__device__ __forceinline__ void signal_counter(unsigned *counter) {
#ifdef __CUDACC__
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
#else
  ++*counter;
  ++emulator::progress;
#endif
}

__device__ __forceinline__ unsigned add_to_counter(unsigned *counter) {  // returns what it was
#ifdef __CUDACC__
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
#else
  ++emulator::progress;
  return (*counter)++;
#endif
}

__device__ __forceinline__ void wait_for_counter(const unsigned *counter, unsigned least) {
#ifdef __CUDACC__
  unsigned found;
  do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
  while (found < least);
#else
  emulator::block_until("a counter", [&] { return *counter >= least; });
#endif
}

// 16 bytes that another block wrote in this launch: from L2, past the caches of the multiprocessor.
__device__ __forceinline__ uint4 load_fresh(const void *from) {
#ifdef __CUDACC__
  return __ldcg(static_cast<const uint4 *>(from));
#else
  emulator::require(uintptr_t(from) % 16 == 0, "16 bytes are read from addresses that are multiples of 16");
  return *static_cast<const uint4 *>(from);
#endif
}

// Cycles of the multiprocessor. The emulator counts what threads wait for in place of time.
__device__ __forceinline__ long long cycles() {
  return PTX(clock64(), (long long)emulator::progress);
}

// Ask for the 128 bytes around an address, so that a later load finds them in L2.
__device__ __forceinline__ void prefetch_line(const void *from) {
  PTX(asm volatile("prefetch.global.L2 [%0];" ::"l"(from)), (void)*static_cast<const volatile char *>(from));
}
