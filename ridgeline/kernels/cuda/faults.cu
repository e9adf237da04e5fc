// Four kernels with one fault each, which a checker must find: what it says of other kernels counts only then.
//
// Launched as a block of 64 threads; x and y are 64 numbers each, and nobody wrote x.

// memcheck: a write far behind the end of y, where no memory is.
extern "C" __global__ void faulty_memory(int *x, int *y) { y[(1L << 40) + threadIdx.x] = 1; }

// racecheck: two warps read what the other one writes, and no barrier is between.
extern "C" __global__ void faulty_race(int *x, int *y) {
  __shared__ int numbers[64];
  numbers[threadIdx.x] = threadIdx.x;
  y[threadIdx.x] = numbers[63 - threadIdx.x];
}

// synccheck: lanes wait for a set of lanes that they are not in.
extern "C" __global__ void faulty_barrier(int *x, int *y) {
  if (threadIdx.x % 32 >= 16) __syncwarp(0x0000ffff);
  y[threadIdx.x] = 1;
}

// initcheck: a read of memory that was never written.
extern "C" __global__ void faulty_start(int *x, int *y) { y[threadIdx.x] = x[threadIdx.x] + 1; }
