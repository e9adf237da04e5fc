// tcgen05, tensor memory and cluster launch control (sm_100a): two blocks multiply together, and sums lie in a memory of
// their own. Each small function has two bodies, as in ptx.cuh. Layouts, descriptors and the order of arrivals are those
// of the PTX ISA 9 (sections tcgen05 and clusterlaunchcontrol).
//
// Blocks of a cluster whose ranks are 2 i and 2 i + 1 are a pair. The even one leads: it alone multiplies.
#pragma once
#include "ptx.cuh"

constexpr unsigned TENSOR_LANES = 128, TENSOR_COLUMNS = 512;  // of a block's tensor memory, 32 bits each

__device__ __forceinline__ unsigned leader_rank() { return cluster_rank() & ~1u; }

// ---- The emulator's side --------------------------------------------------------------------------------------------

#ifndef __CUDACC__
namespace emulator {
inline unsigned in_pair(const Block *own, unsigned half) { return (((own->rank & ~1u) | half) + 1) << REMOTE; }

inline void run_pair(const Block *own, unsigned d, uint64_t a, uint64_t b, unsigned what, bool adds) {
  int n = (what >> 17 & 63) * 8;  // the other bits: D is float32, A and B are bfloat16, both along K, M / 16
  require(what == (1u << 4 | 1u << 7 | 1u << 10 | unsigned(n / 8) << 17 | 16u << 24),
          "tcgen05 in another form than float32 sums of bfloat16 for 256 rows");
  std::vector<float> columns(n * 16);
  for (int j = 0; j < n; ++j)
    for (int k = 0; k < 16; ++k)
      columns[j * 16 + k] = value_of(operand<__nv_bfloat16>(b, j % (n / 2), k, in_pair(own, j / (n / 2))));
  for (unsigned half = 0; half < 2; ++half) {
    Block &block = blocks[(own->rank & ~1u) | half];
    require((d & 0xffff) + n <= block.columns, "tcgen05 beyond the columns that were allocated");
    for (int i = 0; i < 128; ++i) {
      float row[16];
      for (int k = 0; k < 16; ++k) row[k] = value_of(operand<__nv_bfloat16>(a, i, k, in_pair(own, half)));
      for (int j = 0; j < n; ++j) {
        float &sum = block.tensor[i * TENSOR_COLUMNS + (d & 0xffff) + j], more = 0;
        for (int k = 0; k < 16; ++k) more += row[k] * columns[j * 16 + k];
        sum = adds ? sum + more : more;
      }
    }
  }
}
}  // namespace emulator
#endif

// ---- Tensor memory --------------------------------------------------------------------------------------------------

// Allocate columns in both blocks of a pair, and write where they begin to shared memory. One warp of each calls it.
__device__ __forceinline__ void tensor_allocate(unsigned *where, int columns) {
#ifdef __CUDACC__
  asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;\n"
               "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::"r"(shared_address(where)), "r"(columns)
               : "memory");
#else
  struct Own { unsigned *where; int columns; } own{where, columns};
  emulator::together("tcgen05.alloc", &own, [](emulator::Warp &warp) {
    Own &first = *static_cast<Own *>(warp.slots[0]);
    emulator::Block &block = *emulator::current->block;
    emulator::require(block.columns == 0 && first.columns <= int(TENSOR_COLUMNS), "more tensor memory than there is");
    block.columns = first.columns;
    block.tensor.assign(TENSOR_LANES * TENSOR_COLUMNS, NAN);
    *first.where = 0;
  });
#endif
}

__device__ __forceinline__ void tensor_free(unsigned where, int columns) {
#ifdef __CUDACC__
  asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(where), "r"(columns));
#else
  emulator::together("tcgen05.dealloc", &columns, [](emulator::Warp &) { emulator::current->block->columns = 0; });
#endif
}

// What other threads did with tensor memory, on either side of a barrier.
__device__ __forceinline__ void tensor_fence_before() {
  PTX(asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"), );
}
__device__ __forceinline__ void tensor_fence_after() {
  PTX(asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"), );
}

// Read 32 columns of the lanes of a warp: warp w reaches lanes 32 (w % 4) and up, one row each. `from` has the lane in
// its upper 16 bits. The numbers are there after tensor_wait.
__device__ __forceinline__ void tensor_load(float (&d)[32], unsigned from) {
#ifdef __CUDACC__
#define OUT8(i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3]), "=f"(d[i + 4]), "=f"(d[i + 5]), \
    "=f"(d[i + 6]), "=f"(d[i + 7])
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "
               "%15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
               : OUT8(0), OUT8(8), OUT8(16), OUT8(24)
               : "r"(from));
#undef OUT8
#else
  emulator::Thread &self = *emulator::current;
  emulator::require(from >> 16 == self.warp % 4 * 32, "a warp reads lanes of tensor memory that it does not reach");
  emulator::require((from & 0xffff) + 32 <= self.block->columns, "tensor memory that is not allocated");
  memset(d, 0xff, sizeof d);
  self.reads.push_back({d, ((from >> 16) + self.lane) * TENSOR_COLUMNS + (from & 0xffff)});
#endif
}

__device__ __forceinline__ void tensor_wait() {
#ifdef __CUDACC__
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
#else
  emulator::Thread &self = *emulator::current;
  for (emulator::TensorRead &read : self.reads) memcpy(read.to, &self.block->tensor[read.from], 32 * sizeof(float));
  self.reads.clear();
#endif
}

// ---- Products -------------------------------------------------------------------------------------------------------

// float32 sums of bfloat16, both operands along K, 256 rows and N columns: the instruction's descriptor.
__device__ __forceinline__ constexpr unsigned pair_product(int n) {
  return 1u << 4 | 1u << 7 | 1u << 10 | unsigned(n / 8) << 17 | 256u / 16 << 24;
}

// An operand whose rows are 128 bytes of K, as TMA writes it: as for wgmma, but for a constant 1 in bit 46.
__device__ __forceinline__ unsigned long long tensor_operand(const void *from) {
  return (unsigned long long)((shared_address(from) & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 46 | 1ull << 62;
}

// Start d[256, N] += a[256, 16] · b[N, 16]ᵀ by one thread of the leader, or without `adds` d = a · bᵀ. Each block of the
// pair has half of the rows of a, of b and of the sums, at the same places.
__device__ __forceinline__ void pair_multiply(unsigned d, unsigned long long a, unsigned long long b, unsigned what,
                                              bool adds) {
#ifdef __CUDACC__
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %4, 0;\n"
               "tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, adds;\n}" ::"r"(d), "l"(a), "l"(b), "r"(what),
               "r"((int)adds)
               : "memory");
#else
  emulator::require(cluster_rank() == leader_rank(), "the leader of a pair alone multiplies");
  emulator::Thread *self = emulator::current;
  emulator::later(self->block->rank, [=] { emulator::run_pair(self->block, d, a, b, what, adds); });
#endif
}

// Arrive at the barrier that lies here in each block of `mask`, when the products that this thread started have ended.
__device__ __forceinline__ void pair_commit(Mbarrier *barrier, unsigned short mask) {
#ifdef __CUDACC__
  asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(
                   shared_address(barrier)),
               "h"(mask)
               : "memory");
#else
  unsigned address = shared_address(barrier);
  emulator::later(cluster_rank(), [=] {
    for (unsigned rank = 0; rank < emulator::blocks.size(); ++rank)
      if (mask >> rank & 1) emulator::arrive(address | (rank + 1) << emulator::REMOTE, 0);
  });
#endif
}

// TMA into the blocks of `mask`. The bytes are told to the leader of the pair in which they arrive.
__device__ __forceinline__ void tma_load_pair(void *to, const TensorMap &map, int column, int row, Mbarrier *barrier,
                                              unsigned short mask) {
#ifdef __CUDACC__
  asm volatile("{\n.reg .b32 there;\n"
               "mapa.shared::cluster.u32 there, %2, %6;\n"
               "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
               ".cta_group::2 [%0], [%1, {%3, %4}], [there], %5;\n}" ::"r"(shared_address(to)),
               "l"(&map), "r"(shared_address(barrier)), "r"(column), "r"(row), "h"(mask), "r"(leader_rank())
               : "memory");
#else
  emulator::start({map, column, row, shared_address(to), shared_address(barrier), mask, true});
#endif
}

// ---- Cluster launch control: a cluster that runs takes the tile of one that has not begun ----------------------------

struct __align__(16) Answer {
  unsigned words[4];
};

// Ask for a cluster of the grid that has not begun. The answer comes to this place in each block of the cluster, and its
// 16 bytes to the barrier at this place.
__device__ __forceinline__ void ask_for_work(Answer *answer, Mbarrier *barrier) {
#ifdef __CUDACC__
  asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128 "
               "[%0], [%1];" ::"r"(shared_address(answer)), "r"(shared_address(barrier))
               : "memory");
#else
  unsigned to = shared_address(answer), at = shared_address(barrier);
  emulator::later(64 + cluster_rank(), [=] { emulator::answer(to, at); });
#endif
}

// Return true if the answer is a cluster, and the indices of its first block.
__device__ __forceinline__ bool work_of(const Answer &answer, int &x, int &y) {
#ifdef __CUDACC__
  unsigned found;
  asm volatile("{\n.reg .pred found;\n.reg .b128 answer;\n"
               "ld.shared.b128 answer, [%3];\n"
               "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 found, answer;\n"
               "selp.u32 %0, 1, 0, found;\n"
               "mov.b32 %1, 0;\nmov.b32 %2, 0;\n"
               "@found clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%1, %2, _, _}, answer;\n"
               "fence.proxy.async.shared::cta;\n}"  // the next answer comes by the async proxy
               : "=r"(found), "=r"(x), "=r"(y)
               : "r"(shared_address(&answer))
               : "memory");
  return found;
#else
  x = answer.words[0], y = answer.words[1];
  emulator::require(answer.words[3] <= 1, "an answer that has not come");
  return answer.words[3];
#endif
}
