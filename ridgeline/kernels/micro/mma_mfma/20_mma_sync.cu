// What does mma.sync give on Hopper, by shape and format, with all operands in registers?
//
// Hypothesis: the instruction reaches 63 % of the tensor cores, as WMMA does in our GEMM ladder: 2,580 of 4,096 FLOP a
// cycle in 16 bits. Half the depth (k8) is half the work of an instruction that takes as long. Other formats follow their
// bits, but for fp8, which this chip multiplies by wgmma alone: ptxas widens the operands to 16 bits.
//
// Second round: m8n8k4 gave half of what the data sheet says of f64. Hopper's own shape, m16n8k16, should give all of it.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | m16n8k16, bf16, sums f32 | 2580 | FLOP/cycle | KIND=0 rounds=1000 block=256 | |
// | m16n8k16, f16, sums f16 | 2580 | FLOP/cycle | KIND=2 rounds=1000 block=256 | |
// | m16n8k8, bf16, sums f32 | 1290 | FLOP/cycle | KIND=1 rounds=1000 block=256 | |
// | m16n8k8, tf32, sums f32 | 1290 | FLOP/cycle | KIND=3 rounds=1000 block=256 | |
// | m16n8k32, s8, sums s32 | 5160 | FLOP/cycle | KIND=4 rounds=1000 block=256 | |
// | m16n8k32, e4m3, sums f32 | 2580 | FLOP/cycle | KIND=5 rounds=1000 block=256 | |
// | m8n8k4, f64 | 256 | FLOP/cycle | KIND=6 rounds=1000 block=256 | 67 TFLOP/s: NVIDIA's data sheet |
// | m16n8k16, f64 (second round) | 256 | FLOP/cycle | KIND=7 rounds=500 block=256 | 67 TFLOP/s: NVIDIA's data sheet |
// | m16n8k16, bf16, 4 warps | 2580 | FLOP/cycle | KIND=0 rounds=1000 block=128 | |
// | m16n8k16, bf16, one after the other | 33 | cycles | KIND=0 CHAINS=1 rounds=1000 block=32 | |
// | m16n8k8, bf16, one after the other | 18 | cycles | KIND=1 CHAINS=1 rounds=1000 block=32 | |
#include "micro.cuh"
#ifndef CHAINS
#define CHAINS 8
#endif

constexpr unsigned ONES[] = {0x3f803f80, 0x3f803f80, 0x3c003c00, 0x3f800000, 0x01010101, 0x38383838, 1, 1};
constexpr unsigned K[] = {16, 8, 16, 8, 32, 32, 4, 16};
constexpr bool DOUBLE = KIND >= 6;

struct Sums {
  unsigned at[4];
  double wide[4];
};

__device__ __forceinline__ void multiply(Sums &d, unsigned a, unsigned b, const double (&f)[12]) {
#define FOUR_BY_FOUR(WHAT)                                                                                              \
  asm volatile("mma.sync.aligned." WHAT " {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%5, %5}, {%0, %1, %2, %3};"               \
               : "+r"(d.at[0]), "+r"(d.at[1]), "+r"(d.at[2]), "+r"(d.at[3]) : "r"(a), "r"(b))
  if (KIND == 0) FOUR_BY_FOUR("m16n8k16.row.col.f32.bf16.bf16.f32");
  if (KIND == 1)
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %4}, {%5}, {%0, %1, %2, %3};"
                 : "+r"(d.at[0]), "+r"(d.at[1]), "+r"(d.at[2]), "+r"(d.at[3]) : "r"(a), "r"(b));
  if (KIND == 2)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %2, %2, %2}, {%3, %3}, {%0, %1};"
                 : "+r"(d.at[0]), "+r"(d.at[1]) : "r"(a), "r"(b));
  if (KIND == 3) FOUR_BY_FOUR("m16n8k8.row.col.f32.tf32.tf32.f32");
  if (KIND == 4) FOUR_BY_FOUR("m16n8k32.row.col.s32.s8.s8.s32");
  if (KIND == 5) FOUR_BY_FOUR("m16n8k32.row.col.f32.e4m3.e4m3.f32");
  if (KIND == 6)
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(d.wide[0]), "+d"(d.wide[1]) : "d"((double)a), "d"((double)b));
  if (KIND == 7)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, "
                 "{%12, %13, %14, %15}, {%0, %1, %2, %3};"
                 : "+d"(d.wide[0]), "+d"(d.wide[1]), "+d"(d.wide[2]), "+d"(d.wide[3])
                 : "d"(f[0]), "d"(f[1]), "d"(f[2]), "d"(f[3]), "d"(f[4]), "d"(f[5]), "d"(f[6]), "d"(f[7]), "d"(f[8]),
                   "d"(f[9]), "d"(f[10]), "d"(f[11]));
}

__device__ __forceinline__ bool is(const Sums &d, unsigned sum) {
  if (DOUBLE) return d.wide[0] == sum && d.wide[1] == sum && (KIND == 6 || d.wide[3] == sum);
  if (KIND == 4) return d.at[0] == sum && d.at[3] == sum;
  if (KIND == 2) {  // integers up to 32,768 in steps of 16 are numbers of float16
    unsigned exponent = 31 - __clz(sum), bits = (exponent + 15) << 10 | (((sum << 10) >> exponent) & 0x3ff);
    return d.at[0] == (bits | bits << 16) && d.at[1] == d.at[0];
  }
  return __uint_as_float(d.at[0]) == float(sum) && __uint_as_float(d.at[3]) == float(sum);
}

// step is 1 and n is 0, which no compiler knows: else it makes one product of many.
extern "C" __global__ void micro(Count *out, const unsigned *data, unsigned n, unsigned step, unsigned start,
                                 unsigned rounds) {
  unsigned one = ONES[KIND] * step;
  Sums d[CHAINS] = {};
  double f[12];  // all of them 1, in registers of their own
#pragma unroll
  for (int i = 0; i < 12; ++i) f[i] = double(step + n * i);
  __syncthreads();
  long long begin = now();
#pragma unroll 2
  for (unsigned round = 0; round < rounds; ++round)
#pragma unroll
    for (int i = 0; i < CHAINS; ++i) multiply(d[i], one + n * i, one, f);
  bool right = true;
#pragma unroll
  for (int i = 0; i < CHAINS; ++i) right &= is(d[i], rounds * K[KIND]);
  __syncthreads();
  long long cycles = now() - begin;
  right = __syncthreads_and(right);
  unsigned flops = KIND == 6 ? 2 * 8 * 8 * 4 : 2 * 16 * 8 * K[KIND];
  Count products = (Count)rounds * CHAINS * blockDim.x / 32;
  if (threadIdx.x == 0) tell(out, 0, cycles, CHAINS == 1 ? products : products * flops, right);
}
