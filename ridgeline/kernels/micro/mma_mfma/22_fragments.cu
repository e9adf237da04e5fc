// Are the numbers of matrices in the lanes where `layouts.py` says that they are?
//
// Hypothesis: yes. Each lane brings the registers that the host made by those tables, and gives back the sums that it
// has. Operands are random, so that a wrong place shows as a wrong sum.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | mma.m16n8k16 in bf16 | 0 | wrong numbers | WHAT=0 host=fragments | PTX ISA |
// | mma.m16n8k8 in tf32 | 0 | wrong numbers | WHAT=1 host=fragments | PTX ISA |
// | mma.m16n8k32 in s8 | 0 | wrong numbers | WHAT=2 host=fragments | PTX ISA |
// | ldmatrix.x4 | 0 | wrong numbers | WHAT=3 host=fragments | PTX ISA |
// | ldmatrix.x4.trans | 0 | wrong numbers | WHAT=4 host=fragments | PTX ISA |
// | wgmma.m64n8k16, A in shared memory | 0 | wrong numbers | WHAT=5 host=fragments | PTX ISA |
// | wgmma.m64n8k16, A in registers | 0 | wrong numbers | WHAT=6 host=fragments | PTX ISA |
#include "micro.cuh"
#include "wgmma.cuh"

#define MMA(SHAPE)                                                                                                      \
  asm volatile("mma.sync.aligned." SHAPE " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"              \
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

// lanes_a, lanes_b: four and two words for each lane, or, of wgmma, A [64, 16] and B [8, 16] themselves. d: four words for
// each lane. Of ldmatrix, lanes_a is 32 rows of 16 bytes.
extern "C" __global__ void micro(unsigned *d_words, const unsigned *lanes_a, const unsigned *lanes_b) {
  unsigned a[4], b[2], d[4] = {}, lane = threadIdx.x;
#if WHAT == 3 || WHAT == 4
  __shared__ __align__(16) unsigned rows[32 * 4];
  for (int i = 0; i < 4; ++i) rows[4 * lane + i] = lanes_a[4 * lane + i];
  __syncwarp();
#if WHAT == 3
  ldmatrix_x4(d, rows + 4 * lane);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared_address(rows + 4 * lane))
               : "memory");
#endif
#elif WHAT == 5 || WHAT == 6
  __shared__ __align__(1024) unsigned a_rows[64 * 32], b_rows[8 * 32];  // rows of 128 bytes, of which 32 are used
  auto place = [](unsigned i) { return i / 8 * 32 + ((i % 8 / 4) ^ (i / 8 % 8)) * 4 + i % 4; };  // pieces are exchanged
  if (WHAT == 5)
    for (unsigned i = lane; i < 64 * 8; i += 128) a_rows[place(i)] = lanes_a[i];
  for (int i = 0; i < 4; ++i) a[i] = WHAT == 5 ? 0 : lanes_a[4 * lane + i];
  if (lane < 64) b_rows[place(lane)] = lanes_b[lane];
  fence_for_tma();
  __syncthreads();
  float sums[4] = {};
  unsigned long long from = operand(a_rows), by = operand(b_rows);
  wgmma_fence();
  if (WHAT == 5)
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, 0, 0;\nwgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3}, %4, %5, adds, 1, 1, 0, 0;\n}"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "l"(from), "l"(by));
  else
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, 0, 0;\nwgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, adds, 1, 1, 0;\n}"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(by));
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < 4; ++i) d[i] = __float_as_uint(sums[i]);
#else
  for (int i = 0; i < 4; ++i) a[i] = lanes_a[4 * lane + i];
  for (int i = 0; i < 2; ++i) b[i] = lanes_b[2 * lane + i];
#if WHAT == 0
  MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
#elif WHAT == 1
  MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
#else
  MMA("m16n8k32.row.col.s32.s8.s8.s32");
#endif
#endif
  for (int i = 0; i < 4; ++i) d_words[4 * lane + i] = d[i];
}
