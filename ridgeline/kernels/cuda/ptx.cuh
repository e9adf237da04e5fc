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
