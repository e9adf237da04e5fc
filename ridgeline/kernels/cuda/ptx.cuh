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
// Rows that do not exist (inside = false) become zeros; `from` must then be any valid address.

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

// Arrive at the barrier that lies at this place in another block of the cluster.
__device__ __forceinline__ void mbarrier_arrive(Mbarrier *barrier, unsigned rank) {
#ifdef __CUDACC__
  asm volatile("{\n.reg .b32 there;\n"
               "mapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)),
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

// ---- wgmma (sm_90a): four warps multiply from shared memory, while they do other things ------------------------------

// An operand of 64 numbers of K a row (128 bytes), as TMA writes it; `from` is at a multiple of 1,024 bytes, or 32, 64 or
// 96 bytes (16, 32 or 48 numbers of K) further.
__device__ __forceinline__ unsigned long long operand(const void *from) {
  return (unsigned long long)((shared_address(from) & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ void wgmma_fence() {
  PTX(asm volatile("wgmma.fence.sync.aligned;" ::: "memory"), emulator::current->fenced = true);
}

__device__ __forceinline__ void wgmma_commit() {
  PTX(asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"), ++emulator::current->group);
}

// Wait until at most N groups run. Sums may be touched when none does.
template <int N> __device__ __forceinline__ void wgmma_wait() {
#ifdef __CUDACC__
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#else
  emulator::wait_wgmma(N);
#endif
}

// d[64, 128] += a[64, 16] · b[128, 16]ᵀ by a warpgroup, or without `adds` d = a · bᵀ. Lane l of warp w has, for i = 4 j + 2 h + e, row 16 w + l / 4 + 8 h and
// column 8 j + 2 (l % 4) + e in d[i].
__device__ __forceinline__ void wgmma_m64n128k16(float (&d)[64], unsigned long long a, unsigned long long b,
                                                 bool adds) {
#ifdef __CUDACC__
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
               "%64, %65, adds, 1, 1, 0, 0;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
                 "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                 "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                 "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
               : "l"(a), "l"(b), "r"((int)adds));
#else
  emulator::add_wgmma(d, 128, a, b, adds);
#endif
}

// d[64, 256] += a[64, 16] · b[256, 16]ᵀ by a warpgroup, or without `adds` d = a · bᵀ. Lane l of warp w has, for i = 4 j + 2 h + e, row 16 w + l / 4 + 8 h and
// column 8 j + 2 (l % 4) + e in d[i].
__device__ __forceinline__ void wgmma_m64n256k16(float (&d)[128], unsigned long long a, unsigned long long b,
                                                 bool adds) {
#ifdef __CUDACC__
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %130, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
               "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
               "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
               "%128, %129, adds, 1, 1, 0, 0;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
                 "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                 "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                 "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
                 "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
                 "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
                 "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
                 "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
                 "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
                 "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
                 "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
                 "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
               : "l"(a), "l"(b), "r"((int)adds));
#else
  emulator::add_wgmma(d, 256, a, b, adds);
#endif
}
