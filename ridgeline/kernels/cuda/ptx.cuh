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
