// How long does a kernel take that has nothing to do, by the way in which it is launched?
//
// Hypothesis: a kernel behind another one starts when that one has ended and its writes are seen, which takes the device
// 1.6 µs in a stream. A graph knows what comes next: 1.0 µs, as `ridgeline calibrate` found. A dependent launch sets up
// the blocks before the kernel in front has ended, and saves 0.3 µs. A cooperative launch waits for an empty GPU, and
// costs as much as a plain one, since it is empty here. The host needs 3 µs for a call of the driver from Python.
//
// | case | predicted | unit | settings | published |
// |---|---:|---|---|---|
// | in a stream, device | 1.6 | µs | host=launches way=stream | |
// | in a stream, dependent, device | 1.2 | µs | EARLY=1 host=launches way=stream | |
// | in a stream, cooperative, device | 1.7 | µs | host=launches way=together | |
// | in a graph, device | 1.0 | µs | host=launches way=graph | |
// | in a graph, dependent, device | 0.7 | µs | EARLY=1 host=launches way=graph | |
// | in a graph, 132 blocks of 1,024 threads, device | 1.3 | µs | host=launches way=graph grid=132 block=1024 | |
// | host, plain | 3 | µs | host=launches way=host | |
// | host, cooperative | 3.3 | µs | host=launches way=host_together | |
// | host, a graph of one kernel | 4 | µs | host=launches way=host_graph | |
#include "micro.cuh"

extern "C" __global__ void micro(Count *out, Count *data, unsigned n, unsigned step, unsigned start, unsigned rounds) {
#ifdef EARLY
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  if (blockIdx.x + threadIdx.x == 0) asm volatile("red.relaxed.gpu.global.add.u64 [%0], 1;" ::"l"(out) : "memory");
}
