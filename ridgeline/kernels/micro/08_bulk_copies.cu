// How long does a bulk copy from L2 to shared memory take, from its start until its bytes are seen?
//
// Hypothesis: the engine adds some 300 cycles to the 280 of a load from L2, for it makes addresses and tells a barrier. A
// multiprocessor then gets 64 bytes a cycle, so that 16 KB take 256 cycles more. With several copies under way all
// multiprocessors get what L2 gives to loads, less a part for the way through the engine.
//
// Second round: seconds of the whole kernel were those of its check, byte by byte. 7 TB/s are 27 bytes a cycle of each
// multiprocessor at 1.98 GHz; of its own cycles a check is no part.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | 128 bytes | 580 | cycles | n=128 step=1048576 rounds=2000 bytes=1048576 shared=16384 | |
// | 1 KB | 590 | cycles | n=1024 step=1048576 rounds=2000 bytes=1048576 shared=16384 | |
// | 4 KB | 640 | cycles | n=4096 step=1048576 rounds=2000 bytes=1048576 shared=16384 | |
// | 16 KB | 830 | cycles | n=16384 step=1048576 rounds=2000 bytes=1048576 shared=16384 | |
// | 4 KB, four under way, all multiprocessors (second round) | 27 | B/cycle | FLIGHT=4 n=4096 step=17301504 rounds=2000 bytes=17301504 shared=65536 grid=all | |
// | 16 KB, four under way, all multiprocessors (second round) | 27 | B/cycle | FLIGHT=4 n=16384 step=17301504 rounds=1000 bytes=17301504 shared=65536 grid=all | |
// | 4 KB, four under way, all multiprocessors | 7 | TB/s | FLIGHT=4 n=4096 step=17301504 rounds=2000 bytes=17301504 shared=65536 grid=all | |
// | 16 KB, four under way, all multiprocessors | 7 | TB/s | FLIGHT=4 n=16384 step=17301504 rounds=1000 bytes=17301504 shared=65536 grid=all | |
#include "micro.cuh"
#include "ptx.cuh"
#ifndef FLIGHT
#define FLIGHT 1
#endif

// One thread copies `n` bytes at a time, from all places of `step` bytes of data in turn, FLIGHT of them under way.
extern "C" __global__ void micro(Count *out, const unsigned char *data, unsigned n, unsigned step, unsigned start,
                                 unsigned rounds) {
  __shared__ Mbarrier barriers[FLIGHT];
  unsigned char *memory = dynamic_shared();
  if (threadIdx.x) return;
  for (int i = 0; i < FLIGHT; ++i) mbarrier_init(barriers + i, 1);
  fence_mbarrier_init();
  auto from = [&](unsigned copy) { return data + (Count)((copy * gridDim.x + blockIdx.x) % (step / n)) * n; };
  auto begin_copy = [&](unsigned copy) {
    mbarrier_expect(barriers + copy % FLIGHT, n);
    bulk_load(memory + copy % FLIGHT * n, from(copy), n, barriers + copy % FLIGHT);
  };
  auto wait = [&](unsigned copy) { mbarrier_wait(barriers + copy % FLIGHT, copy / FLIGHT % 2); };
  for (unsigned copy = 0; copy < FLIGHT; ++copy) begin_copy(copy);
  long long begin = now();
  for (unsigned copy = 0; copy < rounds; ++copy) {
    wait(copy);
    begin_copy(copy + FLIGHT);
  }
  long long cycles = now() - begin;
  bool right = true;
  for (unsigned copy = rounds; copy < rounds + FLIGHT; ++copy) {
    wait(copy);
    for (unsigned i = 0; i < n; ++i) right &= memory[copy % FLIGHT * n + i] == from(copy)[i];
  }
  tell(out, blockIdx.x, cycles, FLIGHT == 1 ? rounds : (Count)rounds * n, right);
}
