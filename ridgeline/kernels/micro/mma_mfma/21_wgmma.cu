// From which width on does wgmma use the tensor cores fully?
//
// Hypothesis: a product of 64 x N x 16 takes N / 2 cycles of the tensor cores, and reads A (2 KB) and B (32 N bytes) from
// shared memory at 128 bytes a cycle: 16 + N / 4 cycles. So operands are the limit below N = 64: N = 8, 16 and 32 reach
// 22, 40 and 67 %. A from registers leaves N / 4 cycles, and then every width would be enough. One warpgroup fills all
// four tensor cores.
//
// Second round: with A in registers the compiler copied one register into four for each of 16 products, 64 moves in each
// round of the loop. Without them, four cycles of each product are saved: 16.7, 21 and 38 are left for N = 8, 32 and 64.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | 64 x 8 x 16 | 910 | FLOP/cycle | WIDTH=8 rounds=200 block=128 | |
// | 64 x 16 x 16 | 1638 | FLOP/cycle | WIDTH=16 rounds=200 block=128 | |
// | 64 x 32 x 16 | 2730 | FLOP/cycle | WIDTH=32 rounds=200 block=128 | |
// | 64 x 64 x 16 | 4000 | FLOP/cycle | WIDTH=64 rounds=200 block=128 | |
// | 64 x 128 x 16 | 4060 | FLOP/cycle | WIDTH=128 rounds=200 block=128 | |
// | 64 x 256 x 16 | 4080 | FLOP/cycle | WIDTH=256 rounds=200 block=128 | |
// | 64 x 64 x 16, two warpgroups | 4060 | FLOP/cycle | WIDTH=64 rounds=200 block=256 | |
// | 64 x 8 x 16, A in registers | 3600 | FLOP/cycle | WIDTH=8 REGISTERS=1 rounds=200 block=128 | |
// | 64 x 32 x 16, A in registers | 4000 | FLOP/cycle | WIDTH=32 REGISTERS=1 rounds=200 block=128 | |
// | 64 x 64 x 16, A in registers | 4060 | FLOP/cycle | WIDTH=64 REGISTERS=1 rounds=200 block=128 | |
// | 64 x 8 x 16, A in four registers (second round) | 980 | FLOP/cycle | WIDTH=8 REGISTERS=4 rounds=200 block=128 | |
// | 64 x 32 x 16, A in four registers (second round) | 3100 | FLOP/cycle | WIDTH=32 REGISTERS=4 rounds=200 block=128 | |
// | 64 x 64 x 16, A in four registers (second round) | 3430 | FLOP/cycle | WIDTH=64 REGISTERS=4 rounds=200 block=128 | |
#include "micro.cuh"
#include "wgmma.cuh"
#ifndef REGISTERS
#define REGISTERS 0
#endif

#define EIGHT FOUR("+f", 0), FOUR("+f", 4)
#define THIRTY_TWO SIXTEEN("+f", 0), SIXTEEN("+f", 16)
#define NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SHAPE(N) "m64n" #N "k16.f32.bf16.bf16"
#define FROM_REGISTERS(WHAT, NAMES, SUMS, A, B)                                                                         \
  asm volatile("{\n.reg .pred adds;\nsetp.eq.b32 adds, 0, 0;\nwgmma.mma_async.sync.aligned." WHAT " {" NAMES "}, {" A     \
               "}, " B ", adds, 1, 1, 0;\n}"                                                                            \
               : SUMS                                                                                                   \
               : "r"(one[0]), "r"(one[1]), "r"(one[2]), "r"(one[3]), "l"(b))

constexpr unsigned BATCH = 16, SUMS = WIDTH / 2, ONE = 0x3f803f80;  // two numbers of bfloat16

// Add A · Bᵀ. `one`: the registers of A.
__device__ __forceinline__ void multiply(float (&d)[SUMS], unsigned long long a, unsigned long long b,
                                         const unsigned (&one)[4]) {
  constexpr bool adds = true;
#if REGISTERS && WIDTH == 8
  FROM_REGISTERS(SHAPE(8), "%0, %1, %2, %3", FOUR("+f", 0), "%4, %5, %6, %7", "%8");
#elif REGISTERS && WIDTH == 32
  FROM_REGISTERS(SHAPE(32), NAMES_16, SIXTEEN("+f", 0), "%16, %17, %18, %19", "%20");
#elif REGISTERS && WIDTH == 64
  FROM_REGISTERS(SHAPE(64), NAMES_32, THIRTY_TWO, "%32, %33, %34, %35", "%36");
#elif WIDTH == 8
  WGMMA(SHAPE(8), "%0, %1, %2, %3", FOUR("+f", 0), "%4", "%5", "%6", ", 1, 1, 0, 0");
#elif WIDTH == 16
  WGMMA(SHAPE(16), "%0, %1, %2, %3, %4, %5, %6, %7", EIGHT, "%8", "%9", "%10", ", 1, 1, 0, 0");
#elif WIDTH == 32
  WGMMA(SHAPE(32), NAMES_16, SIXTEEN("+f", 0), "%16", "%17", "%18", ", 1, 1, 0, 0");
#elif WIDTH == 64
  WGMMA(SHAPE(64), NAMES_32, THIRTY_TWO, "%32", "%33", "%34", ", 1, 1, 0, 0");
#elif WIDTH == 128
  wgmma_m64n128k16(d, a, b, true);
#else
  wgmma_m64n256k16(d, a, b, true);
#endif
}

// All numbers of A and of B are 1. step is 1 and n is 0, which no compiler knows.
extern "C" __global__ void __launch_bounds__(256, 1)
    micro(Count *out, const unsigned *data, unsigned n, unsigned step, unsigned start, unsigned rounds) {
  __shared__ __align__(1024) unsigned a[64 * 32], b[WIDTH * 32];  // rows of 64 numbers
  for (unsigned i = threadIdx.x; i < 64 * 32; i += blockDim.x) a[i] = ONE;
  for (unsigned i = threadIdx.x; i < WIDTH * 32; i += blockDim.x) b[i] = ONE;
  fence_for_tma();  // the tensor cores read what threads wrote
  __syncthreads();
  float d[SUMS] = {};
  unsigned long long a_at = operand(a), b_at = operand(b);
  unsigned one[4];
#pragma unroll
  for (unsigned i = 0; i < 4; ++i) one[i] = ONE * step + (REGISTERS == 4 ? n * i : 0);
  wgmma_fence();
  long long begin = now();
#pragma unroll 1
  for (unsigned round = 0; round < rounds; ++round) {
    wgmma_fence();
#pragma unroll
    for (unsigned i = 0; i < BATCH; ++i) multiply(d, a_at + i % 4 * 2, b_at + i % 4 * 2, one);
    wgmma_commit();
    wgmma_wait<0>();
  }
  __syncthreads();
  long long cycles = now() - begin;
  bool right = true;
#pragma unroll
  for (unsigned i = 0; i < SUMS; ++i) right &= d[i] == float(rounds * BATCH * 16);
  right = __syncthreads_and(right);
  if (threadIdx.x == 0) tell(out, 0, cycles, (Count)rounds * BATCH * 2 * 64 * WIDTH * 16 * blockDim.x / 128, right);
}
