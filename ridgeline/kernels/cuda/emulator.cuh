// CUDA C++ on a CPU, for tests: a .cu file that includes this header is plain C++.
//
// Each thread of a block is a fiber (ucontext) and runs until it must wait. Blocks run one after the other, the blocks
// of a cluster together. The emulator is strict where a GPU is only unlucky:
//
//   * shared memory begins as NaN (all bits set), and each launch may run its threads in another order, or some warps
//     as far ahead of others as barriers let them;
//   * an asynchronous copy overwrites its destination with NaN at once, and delivers as late as it may: cp.async when
//     its group is waited for, TMA when nothing else can run. A missing wait, or a buffer that is filled again too
//     early, therefore gives NaN;
//   * wgmma reads shared memory as late, each warp for itself; until its group was waited for its sums are NaN;
//   * a thread that waits for ever, lanes that meet at different instructions, and an access to a page without access
//     end the launch with a sentence.
//
// It does not model time, bank conflicts of plain loads, or the memory model between barriers.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <signal.h>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("shared_memory")))

extern "C" __attribute__((weak, visibility("hidden"))) unsigned char __start_shared_memory[];
extern "C" __attribute__((weak, visibility("hidden"))) unsigned char __stop_shared_memory[];

struct dim3 { unsigned x, y, z; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(8) uint2 { unsigned x, y; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T max(T a, T b) { return a > b ? a : b; }

// ---- Numbers -------------------------------------------------------------------------------------------------------

struct __nv_bfloat16 { uint16_t bits; };
struct __half { uint16_t bits; };
struct __nv_fp8_e4m3 {
  uint8_t bits;
  __nv_fp8_e4m3() = default;
  explicit __nv_fp8_e4m3(float x);
};

inline uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
inline float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

inline float __bfloat162float(__nv_bfloat16 x) { return float_of(uint32_t(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16(float x) {  // to the nearest, ties to even
  uint32_t u = bits_of(x);
  if (x != x) return {0x7fff};
  return {uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
inline float __half2float(__half x) {
  uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 31, mantissa = x.bits & 1023;
  if (exponent == 31) return float_of(sign | 0x7f800000 | mantissa << 13);
  if (exponent == 0) return (sign ? -1.f : 1.f) * std::ldexp(float(mantissa), -24);
  return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}
inline __half __float2half(float x) {
  uint16_t sign = bits_of(x) >> 16 & 0x8000;
  float size = std::fabs(x);
  if (x != x) return {0x7fff};
  if (size >= 65520.f) return {uint16_t(sign | 0x7c00)};
  if (size < 6.103515625e-5f) return {uint16_t(sign | uint16_t(std::nearbyint(std::ldexp(size, 24))))};
  uint32_t u = bits_of(size);
  u += 0xfff + (u >> 13 & 1);
  return {uint16_t(sign | ((u >> 13) - (112 << 10)))};
}

inline float value_of(__nv_bfloat16 x) { return __bfloat162float(x); }
inline float value_of(__half x) { return __half2float(x); }
inline int value_of(signed char x) { return x; }
inline float value_of(float x) { return float_of(bits_of(x) & ~0x1fffu); }  // tf32
inline float value_of(__nv_fp8_e4m3 x) {  // no infinity; the largest is 448
  int exponent = x.bits >> 3 & 15, mantissa = x.bits & 7;
  if ((x.bits & 0x7f) == 0x7f) return NAN;
  float size = exponent ? std::ldexp(float(8 + mantissa), exponent - 10) : std::ldexp(float(mantissa), -9);
  return x.bits & 0x80 ? -size : size;
}
inline __nv_fp8_e4m3::__nv_fp8_e4m3(float x) {  // to the nearest, ties to even; what is too large becomes 448
  float size = std::fabs(x);
  uint8_t sign = bits_of(x) >> 24 & 0x80;
  int exponent = max(size > 0 ? std::ilogb(size) : -6, -6);
  int units = x != x || size >= 448 ? 0 : int(std::nearbyint(std::ldexp(size, 3 - exponent)));  // 8 to 16, or fewer
  bits = x != x ? 0x7f : size >= 448 ? sign | 0x7e : sign | uint8_t((exponent + 6) * 8 + units);
}

#ifndef WARP_LANES
#define WARP_LANES 32  // 64: a wave of an AMD GPU of the CDNA family
#endif

namespace emulator {

// ---- Threads, warps, blocks ----------------------------------------------------------------------------------------

constexpr unsigned LANES = WARP_LANES, STACK = 128 << 10, SHARED_LIMIT = 227 << 10;

struct Copy { void *to; const void *from; unsigned bytes, kept; };  // cp.async: the last bytes - kept are zeros

struct Wgmma {  // one thread's view of an instruction that has not run
  void *d;
  uint64_t a, b;
  int n, group;
  bool adds;
  void (*run)(const Wgmma &, unsigned row, float *const (&sums)[32]);  // of a warp
};

struct TensorRead { float *to; unsigned from; };  // tcgen05.ld that was not waited for

struct Accumulator { void *d; int n; std::vector<float> saved; };  // registers that wgmma owns now

struct Block;
struct TileStore;

struct Thread {
  ucontext_t context;
  char *stack = nullptr;
  dim3 index{};
  Block *block = nullptr;
  unsigned number = 0, lane = 0, warp = 0;
  bool done = false, slow = false;
  const char *waits = nullptr;
  std::vector<std::vector<Copy>> copies{1};  // of groups; the last one is open
  std::vector<Wgmma> products;
  std::vector<Accumulator> owned;
  std::vector<TensorRead> reads;
  int group = 0;
  bool fenced = false;
  std::vector<std::vector<TileStore>> stores{1};  // of groups, by TMA; the last one is open
  bool unfenced = false;                          // it wrote shared memory that TMA may not read yet
};

struct Warp {
  unsigned size = 0, arrived = 0, generation = 0;
  const char *name = nullptr;
  void *slots[LANES];
  unsigned ended = 0;  // waits for wgmma
  int groups = 0;      // that the wait leaves running
};

struct Named { unsigned arrived = 0, generation = 0; };

struct Block {
  dim3 index{};
  unsigned rank = 0;
  unsigned char *dynamic = nullptr;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Named barriers[16];
  std::vector<float> tensor;  // tensor memory (sm_100): 128 lanes of 512 columns
  unsigned columns = 0;       // of it that are allocated
};

struct Map {  // TensorMap on the host: a matrix of rows, read in boxes
  const unsigned char *base;
  uint64_t rows, columns, pitch;  // pitch: bytes
  uint32_t box_rows, box_columns, item, swizzle;  // swizzle: 0, or the bytes after which the pattern repeats: 128
};

struct Load { Map map; int x, y; unsigned to, barrier, mask; bool pair = false; };  // pair: tells the even block

struct TileStore { Map map; int x, y; unsigned from; };

struct Launch { unsigned grid[3], block[3], cluster, shared, order; };

inline Thread *current;
inline ucontext_t scheduler;
inline Launch launch;
inline std::vector<Block> blocks;  // that run now: one, or those of a cluster
inline std::vector<Load> loads;    // TMA's, on their way
inline std::vector<Warp *> multiplying;  // warps that wait for wgmma
inline Named cluster_barrier;
inline std::map<unsigned, std::deque<std::function<void()>>> queues;  // of things that happen later, each in its order
inline unsigned next_cluster, cluster_count, taken;  // of the grid; those that the running cluster took
inline unsigned long progress;
inline unsigned random_state;
inline char problem[512];
inline unsigned long access_count, wavefront_count, tma_bytes;

[[noreturn]] inline void fail(const char *text) {
  const Thread &t = *current;
  const dim3 &b = t.block->index;
  snprintf(problem, sizeof problem, "block (%u, %u, %u), thread %u: %s", b.x, b.y, b.z, t.number, text);
  setcontext(&scheduler);
  abort();
}

inline void require(bool holds, const char *text) { if (!holds) fail(text); }

template <class F> void block_until(const char *what, F holds) {
  if (holds()) return;
  ++progress;  // it came this far
  current->waits = what;
  do swapcontext(&current->context, &scheduler); while (!holds());
  current->waits = nullptr;
  ++progress;
}

// Let the lanes of a warp meet at an instruction. The last one to come runs it for all; `mine` is what a lane brings.
template <class F> void together(const char *name, void *mine, F run) {
  Warp &warp = current->block->warps[current->warp];
  unsigned generation = warp.generation;
  if (warp.arrived == 0) warp.name = name;
  require(!strcmp(warp.name, name), "the lanes of a warp meet at different instructions");
  warp.slots[current->lane] = mine;
  if (++warp.arrived == warp.size) {
    run(warp);
    warp.arrived = 0;
    ++warp.generation;
  } else {
    block_until(name, [&] { return warp.generation != generation; });
  }
}

inline void meet(Named &barrier, unsigned count, const char *what) {
  unsigned generation = barrier.generation;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.generation;
  } else {
    block_until(what, [&] { return barrier.generation != generation; });
  }
}

// ---- Shared memory -------------------------------------------------------------------------------------------------
// An address of 32 bits: an offset into the dynamic part, or STATIC + an offset into the variables marked __shared__.
// Bits 24 and up name a block of the cluster (its rank + 1), or are 0 for the own block.

constexpr unsigned STATIC = 1u << 20, REMOTE = 24;

inline unsigned address_of(const void *pointer) {
  const unsigned char *p = static_cast<const unsigned char *>(pointer), *dynamic = current->block->dynamic;
  if (p >= dynamic && p < dynamic + launch.shared) return unsigned(p - dynamic);
  if (p >= __start_shared_memory && p < __stop_shared_memory) return STATIC + unsigned(p - __start_shared_memory);
  fail("an address that is not in shared memory");
}

inline unsigned char *pointer_to(unsigned address, unsigned bytes) {
  unsigned rank = address >> REMOTE, offset = address & ((1u << REMOTE) - 1);
  require(rank <= blocks.size(), "a block that is not in the cluster");
  Block &block = rank ? blocks[rank - 1] : *current->block;
  if (offset >= STATIC) {
    offset -= STATIC;
    require(offset + bytes <= unsigned(__stop_shared_memory - __start_shared_memory), "beyond static shared memory");
    return __start_shared_memory + offset;
  }
  require(offset + bytes <= launch.shared, "beyond dynamic shared memory");
  return block.dynamic + offset;
}

// ---- mbarrier: 64 bits of shared memory: a mark of 8, phase 1, count 11, pending 12, bytes to come 32 ---------------

struct Barrier {
  int32_t bytes;
  uint32_t pending : 12, count : 11, phase : 1, mark : 8;
};
static_assert(sizeof(Barrier) == 8);
constexpr unsigned MARK = 0xb7;

inline Barrier &barrier_at(unsigned address) {
  Barrier &barrier = *reinterpret_cast<Barrier *>(pointer_to(address, 8));
  require(barrier.mark == MARK, "an mbarrier that was never initialized");
  return barrier;
}

inline void init(unsigned address, unsigned count) {
  *reinterpret_cast<Barrier *>(pointer_to(address, 8)) = {0, count, count, 0, MARK};
}

inline void settle(Barrier &barrier) {
  if (barrier.pending || barrier.bytes) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.count;
  ++progress;
}

inline void arrive(unsigned address, int bytes) {
  Barrier &barrier = barrier_at(address);
  require(barrier.pending, "more threads arrive at an mbarrier than it counts");
  barrier.bytes += bytes;
  --barrier.pending;
  settle(barrier);
}

// ---- TMA -----------------------------------------------------------------------------------------------------------

template <class F> void each_destination(const Load &load, F run) {
  for (unsigned rank = 0; rank < blocks.size(); ++rank)
    if (load.mask >> rank & 1) run((rank + 1) << REMOTE);
}

inline void start(Load load) {
  unsigned bytes = load.map.box_rows * load.map.box_columns * load.map.item;
  require(load.to % 128 == 0, "TMA writes to addresses that are multiples of 128 bytes");
  require(load.map.swizzle != 128 || load.map.box_columns * load.map.item == 128, "a swizzled box is 128 bytes wide");
  each_destination(load, [&](unsigned block) { memset(pointer_to(block | load.to, bytes), 0xff, bytes); });
  loads.push_back(load);
}

inline void start_bulk(unsigned to, const void *from, unsigned bytes, unsigned barrier) {
  require(to % 16 == 0 && uintptr_t(from) % 16 == 0 && bytes % 16 == 0, "bulk copies move multiples of 16 bytes");
  memset(pointer_to(to, bytes), 0xff, bytes);
  loads.push_back({{static_cast<const unsigned char *>(from), 1, bytes, bytes, 1, bytes, 1, 0}, 0, 0, to, barrier,
                   1u << current->block->rank});
}

inline unsigned drawn(size_t count) { return ((random_state = random_state * 1664525 + 1013904223) >> 8) % count; }

inline void deliver(unsigned at) {
  Load load = loads[at];
  loads.erase(loads.begin() + at);
  const Map &map = load.map;
  unsigned width = map.box_columns * map.item, bytes = map.box_rows * width;
  each_destination(load, [&](unsigned block) {
    for (unsigned row = 0; row < map.box_rows; ++row)
      for (unsigned column = 0; column < map.box_columns; ++column) {
        unsigned to = load.to + row * width + column * map.item;
        if (map.swizzle == 128) to ^= (to >> 7 & 7) << 4;
        unsigned char *place = pointer_to(block | to, map.item);
        int64_t y = int64_t(load.y) + row, x = int64_t(load.x) + column;
        bool inside = y >= 0 && x >= 0 && uint64_t(y) < map.rows && uint64_t(x) < map.columns;
        if (inside) memcpy(place, map.base + y * map.pitch + x * map.item, map.item);
        else memset(place, 0, map.item);
      }
    unsigned rank = (block >> REMOTE) - 1;
    Barrier &barrier = barrier_at((load.pair ? ((rank & ~1u) + 1) << REMOTE : block) | load.barrier);
    barrier.bytes -= int(bytes);
    settle(barrier);
  });
  tma_bytes += bytes;
}

// ---- Matrix instructions: fragments as the PTX ISA has them ---------------------------------------------------------

inline float number(uint16_t bits) { return __bfloat162float(__nv_bfloat16{bits}); }

inline uint16_t half_of(const uint32_t *registers, int at) { return uint16_t(registers[at / 2] >> 16 * (at % 2)); }

// mma.m16n8k16: where element `at` of a lane's registers lies in its matrix.
struct Place { int row, column; };
inline Place of_a(int lane, int at) { return {lane / 4 + 8 * (at / 2 % 2), lane % 4 * 2 + at % 2 + 8 * (at / 4)}; }
inline Place of_b(int lane, int at) { return {lane % 4 * 2 + at % 2 + 8 * (at / 2), lane / 4}; }  // (k, n)
inline Place of_c(int lane, int at) { return {lane / 4 + 8 * (at / 2), lane % 4 * 2 + at % 2}; }
// wgmma.m64nNk16: the row counts within the warp's 16.
inline Place of_wgmma(int lane, int at) { return {lane / 4 + 8 * (at / 2 % 2), at / 4 * 8 + lane % 4 * 2 + at % 2}; }

struct Mma { float *d; const uint32_t *a, *b; };

inline void run_mma(Warp &warp) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const Mma &own = *static_cast<Mma *>(warp.slots[lane]);
    for (int at = 0; at < 8; ++at) {
      Place p = of_a(lane, at);
      a[p.row][p.column] = number(half_of(own.a, at));
    }
    for (int at = 0; at < 4; ++at) {
      Place p = of_b(lane, at);
      b[p.row][p.column] = number(half_of(own.b, at));
    }
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int at = 0; at < 4; ++at) {
      Place p = of_c(lane, at);
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += a[p.row][k] * b[k][p.column];
      static_cast<Mma *>(warp.slots[lane])->d[at] += sum;
    }
}

// Boxes from shared memory to a matrix: read and written when their group is waited for, which is as late as may be.
inline void store_box(const TileStore &store) {
  const Map &map = store.map;
  unsigned width = map.box_columns * map.item;
  for (unsigned row = 0; row < map.box_rows; ++row)
    for (unsigned column = 0; column < map.box_columns; ++column) {
      unsigned from = store.from + row * width + column * map.item;
      if (map.swizzle == 128) from ^= (from >> 7 & 7) << 4;
      int64_t y = int64_t(store.y) + row, x = int64_t(store.x) + column;
      if (y < 0 || x < 0 || uint64_t(y) >= map.rows || uint64_t(x) >= map.columns) continue;
      memcpy(const_cast<unsigned char *>(map.base) + y * map.pitch + x * map.item, pointer_to(from, map.item), map.item);
    }
}

inline void start_store(const Map &map, const void *from, int x, int y) {
  for (Thread &each : current->block->threads)
    require(each.warp != current->warp || !each.unfenced, "TMA reads what was written before fence.proxy.async");
  require(address_of(from) % 128 == 0, "TMA reads from addresses that are multiples of 128 bytes");
  current->stores.back().push_back({map, x, y, address_of(from)});
}

inline void wait_stores(unsigned left) {
  auto &groups = current->stores;
  while (groups.size() > left + 1) {
    for (const TileStore &store : groups[0]) store_box(store);
    groups.erase(groups.begin());
  }
}

struct Stmatrix { const uint32_t *r; void *row; };

inline void run_stmatrix(Warp &warp) {  // .x4: lane 8i + j has the address of row j of matrix i
  for (int i = 0; i < 4; ++i) {
    unsigned used[8] = {}, most = 0;
    for (int j = 0; j < 8; ++j) {
      unsigned address = address_of(static_cast<Stmatrix *>(warp.slots[8 * i + j])->row);
      require(address % 16 == 0, "stmatrix writes rows that begin at multiples of 16 bytes");
      most = max(most, ++used[address / 16 % 8]);
      for (int lane = 0; lane < 4; ++lane)
        memcpy(pointer_to(address + 4 * lane, 4), &static_cast<Stmatrix *>(warp.slots[4 * j + lane])->r[i], 4);
    }
    wavefront_count += most;
  }
  access_count += 4;
}

struct Ldmatrix { uint32_t *r; const void *row; };

inline void run_ldmatrix(Warp &warp) {  // .x4: lane 8i + j has the address of row j of matrix i
  uint16_t m[4][8][8];
  for (int i = 0; i < 4; ++i) {
    unsigned used[8] = {}, most = 0;  // of the 8 groups of 4 banks: rows in one group wait for one another
    for (int j = 0; j < 8; ++j) {
      const void *row = static_cast<Ldmatrix *>(warp.slots[8 * i + j])->row;
      unsigned address = address_of(row);
      require(address % 16 == 0, "ldmatrix reads rows that begin at multiples of 16 bytes");
      memcpy(m[i][j], pointer_to(address, 16), 16);
      most = max(most, ++used[address / 16 % 8]);
    }
    wavefront_count += most;
  }
  access_count += 4;
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i)
      memcpy(&static_cast<Ldmatrix *>(warp.slots[lane])->r[i], &m[i][lane / 4][lane % 4 * 2], 4);
}

// An element of an operand of wgmma that is K-major with a swizzle of 128 bytes: rows of 128 bytes, 8 of them an atom.
template <class T> T operand(uint64_t descriptor, int row, int k, unsigned block = 0) {
  unsigned start = unsigned(descriptor & 0x3fff) << 4, stride = unsigned(descriptor >> 32 & 0x3fff) << 4;
  require(descriptor >> 62 == 1, "the emulator knows operands with a swizzle of 128 bytes alone");
  unsigned address = start + row / 8 * stride + row % 8 * 128 + k * sizeof(T);
  address ^= (address >> 7 & 7) << 4;
  T element;
  memcpy(&element, pointer_to(block | address, sizeof(T)), sizeof(T));
  return element;
}

// The product of a warp's 16 rows, which begin at `row`; a lane's sums are float, or int for int8.
template <class T> void run_product(const Wgmma &op, unsigned row, float *const (&sums)[32]) {
  typedef decltype(value_of(T())) S;
  constexpr int depth = 32 / sizeof(T);
  std::vector<S> a(16 * depth), b(op.n * depth);
  for (int r = 0; r < 16; ++r)
    for (int k = 0; k < depth; ++k) a[r * depth + k] = value_of(operand<T>(op.a, row + r, k));
  for (int n = 0; n < op.n; ++n)
    for (int k = 0; k < depth; ++k) b[n * depth + k] = value_of(operand<T>(op.b, n, k));
  for (int lane = 0; lane < 32; ++lane) {
    S *d = reinterpret_cast<S *>(sums[lane]);
    for (int i = 0; i < op.n / 2; ++i) {
      Place p = of_wgmma(lane, i);
      S sum = op.adds ? d[i] : 0;
      for (int k = 0; k < depth; ++k) sum += a[p.row * depth + k] * b[p.column * depth + k];
      d[i] = sum;
    }
  }
}

inline float *saved(Thread &thread, const void *d) {
  for (Accumulator &own : thread.owned) if (own.d == d) return own.saved.data();
  return nullptr;
}

inline void run_wgmma(Warp &warp, int groups) {  // the oldest products, until at most `groups` groups are left
  Thread *threads[32];
  for (int lane = 0; lane < 32; ++lane) threads[lane] = static_cast<Thread *>(warp.slots[lane]);
  Thread &first = *threads[0];
  size_t count = 0;
  while (count < first.products.size() && first.products[count].group < first.group - groups) ++count;
  for (size_t at = 0; at < count; ++at) {
    const Wgmma &op = first.products[at];
    for (Thread *each : threads)
      require(each->products.size() > at && each->products[at].a == op.a && each->products[at].b == op.b,
              "the lanes of a warp give wgmma different operands");
    float *sums[32];
    for (int lane = 0; lane < 32; ++lane) sums[lane] = saved(*threads[lane], threads[lane]->products[at].d);
    op.run(op, first.warp % 4 * 16, sums);
  }
  for (Thread *each : threads) {
    each->products.erase(each->products.begin(), each->products.begin() + count);
    each->fenced = false;
    if (!each->products.empty()) continue;
    for (Accumulator &own : each->owned) memcpy(own.d, own.saved.data(), own.n * sizeof(float));
    each->owned.clear();
  }
}

inline void wait_wgmma(int groups) {
  Warp &warp = current->block->warps[current->warp];
  unsigned ended = warp.ended;
  warp.groups = groups;
  together("wgmma.wait_group", current, [](Warp &all) { multiplying.push_back(&all); });
  block_until("wgmma", [&] { return warp.ended != ended; });
}

inline void multiply(unsigned at) {
  Warp &warp = *multiplying[at];
  multiplying.erase(multiplying.begin() + at);
  current = static_cast<Thread *>(warp.slots[0]);
  run_wgmma(warp, warp.groups);
  ++warp.ended;
}

inline void later(unsigned queue, std::function<void()> run) { queues[queue].push_back(run); }

inline bool finished(const Block &block) {
  for (const Thread &thread : block.threads) if (!thread.done) return false;
  return true;
}

// st.async: 16 bytes of each lane into a block of the cluster, whose barrier counts them. They come as late as may be.
struct RemoteStore { unsigned to, barrier, words[4]; };

inline void start_stores(Warp &warp) {
  std::vector<RemoteStore> stores;
  for (unsigned lane = 0; lane < warp.size; ++lane) stores.push_back(*static_cast<RemoteStore *>(warp.slots[lane]));
  for (const RemoteStore &store : stores) {
    require(store.to % 16 == 0, "st.async of 16 bytes writes to addresses that are multiples of 16");
    memset(pointer_to(store.to, 16), 0xff, 16);
  }
  later(256 + current->block->rank * 64 + current->warp, [stores] {
    for (const RemoteStore &store : stores) {
      require(!finished(blocks[(store.to >> REMOTE) - 1]), "st.async writes to a block that has ended");
      memcpy(pointer_to(store.to, 16), store.words, 16);
      Barrier &told = barrier_at(store.barrier);
      told.bytes -= 16;
      settle(told);
    }
  });
}

// Nothing else can run: let one thing happen that was asked for. Loads go first, or the others (order 1), or any.
inline bool happen() {
  size_t known = loads.size() + multiplying.size(), all = known + queues.size();
  if (!all) return false;
  unsigned at = launch.order > 1 ? drawn(all) : launch.order == 1 && all > loads.size() ? loads.size() : 0;
  if (at < loads.size()) deliver(at);
  else if (at < known) multiply(at - loads.size());
  else {
    auto queue = std::next(queues.begin(), at - known);
    std::function<void()> run = queue->second.front();
    queue->second.pop_front();
    if (queue->second.empty()) queues.erase(queue);
    run();
  }
  return true;
}

// Cluster launch control: give the next cluster of the grid that has not begun to the one that runs, which takes at most
// two, so that others begin too. Bytes come to all blocks of the cluster.
inline void answer(unsigned to, unsigned barrier) {
  require(taken <= 2, "it asks for work after it was told that there is none");
  bool found = next_cluster < cluster_count && taken < 2;
  unsigned width = launch.grid[0] / unsigned(blocks.size()), x = next_cluster % width * unsigned(blocks.size());
  unsigned words[4] = {found ? x : ~0u, found ? next_cluster / width % launch.grid[1] : ~0u, 0, found};
  next_cluster += found;
  taken = found ? taken + 1 : 3;
  for (unsigned rank = 0; rank < blocks.size(); ++rank) {
    memcpy(pointer_to((rank + 1) << REMOTE | to, 16), words, 16);
    Barrier &told = barrier_at((rank + 1) << REMOTE | barrier);
    told.bytes -= 16;
    settle(told);
  }
}

template <class T> void add_wgmma(void *d, int n, uint64_t a, uint64_t b, bool adds) {
  Thread &self = *current;
  require(self.fenced, "wgmma before wgmma.fence");
  if (!saved(self, d)) {
    const float *sums = static_cast<float *>(d);
    self.owned.push_back({d, n / 2, std::vector<float>(sums, sums + n / 2)});
    memset(d, 0xff, n / 2 * sizeof(float));
  }
  self.products.push_back({d, a, b, n, self.group, adds, run_product<T>});
}

// ---- Launch --------------------------------------------------------------------------------------------------------

inline void (*enter)(void **);
inline void **arguments;

inline void trampoline() {
  enter(arguments);
  if (!current->products.empty()) fail("it ends with wgmma on its way");
  if (current->copies.size() > 1 || !current->copies[0].empty()) fail("it ends with cp.async on its way");
  current->done = true;
  ++progress;
  setcontext(&scheduler);
}

inline void run_blocks() {
  std::vector<Thread *> all;
  for (Block &block : blocks) for (Thread &thread : block.threads) all.push_back(&thread);
  if (launch.order == 1) for (size_t i = 0; i < all.size() / 2; ++i) std::swap(all[i], all[all.size() - 1 - i]);
  for (Thread *thread : all) {
    getcontext(&thread->context);
    thread->context.uc_stack.ss_sp = thread->stack;
    thread->context.uc_stack.ss_size = STACK;
    thread->context.uc_link = nullptr;
    makecontext(&thread->context, trampoline, 0);
  }
  if (launch.order > 1)  // every other warp, by chance, waits until the others cannot go on
    for (Block &block : blocks) {
      std::vector<bool> slow(block.warps.size());
      for (size_t i = 0; i < slow.size(); ++i) slow[i] = drawn(2);
      for (Thread &thread : block.threads) thread.slow = slow[thread.warp];
    }
  bool all_run = launch.order <= 1;
  for (size_t left = all.size(); left;) {
    if (launch.order > 1)
      for (size_t i = all.size() - 1; i > 0; --i)
        std::swap(all[i], all[drawn(i + 1)]);
    unsigned long before = progress;
    for (Thread *thread : all) {
      if (thread->done || (thread->slow && !all_run)) continue;
      current = thread;
      swapcontext(&scheduler, &thread->context);
      if (problem[0]) return;
      left -= thread->done;
    }
    if (!left) break;
    bool went_on = progress != before, tried = all_run;
    bool early = !went_on && !tried && drawn(launch.order % 2 ? 2 : 64) && happen();  // before slow warps go on
    all_run = launch.order <= 1 || (!went_on && !tried && !early);
    if (problem[0]) return;
    if (went_on || !tried) continue;
    for (Thread *thread : all) if (!thread->done) current = thread;
    if (!happen() && !problem[0]) {
      snprintf(problem, sizeof problem, "block (%u, %u, %u), thread %u waits for ever: %s", current->block->index.x,
               current->block->index.y, current->block->index.z, current->number, current->waits);
      return;
    }
    if (problem[0]) return;
  }
  if (!loads.empty()) snprintf(problem, sizeof problem, "the blocks ended with TMA loads on their way");
  if (!queues.empty()) snprintf(problem, sizeof problem, "the blocks ended with tcgen05, or stores, on their way");
  for (const Block &block : blocks)
    if (block.columns) snprintf(problem, sizeof problem, "a block ended with tensor memory that it had not freed");
}

inline void stray(int) { fail("it reads or writes memory that is not its own"); }

// For the time of a launch: a thread that touches a page it may not touch ends the launch, and not the process.
struct Guarded {
  struct sigaction before;
  Guarded() {
    struct sigaction own = {};
    own.sa_handler = stray;
    own.sa_flags = SA_NODEFER;
    sigaction(SIGSEGV, &own, &before);
  }
  ~Guarded() { sigaction(SIGSEGV, &before, nullptr); }
};

inline const char *run(const Launch &wanted, void **given, void (*kernel)(void **)) {
  Guarded guarded;
  launch = wanted;
  enter = kernel;
  arguments = given;
  problem[0] = 0;
  random_state = launch.order * 2654435761u;
  access_count = wavefront_count = tma_bytes = 0;
  loads.clear();
  multiplying.clear();
  queues.clear();
  unsigned size = launch.cluster ? launch.cluster : 1;
  unsigned threads = launch.block[0] * launch.block[1] * launch.block[2];
  size_t statics = __stop_shared_memory - __start_shared_memory;
  if (size > 1 && statics) return "blocks of a cluster keep what they share in dynamic shared memory";
  if (launch.shared + statics > SHARED_LIMIT) return "more shared memory than a block can have";
  if (launch.grid[0] % size) return "the grid is no multiple of the cluster";
  constexpr unsigned GUARD = 1024;
  std::vector<char> stacks(size_t(size) * threads * STACK);
  std::vector<unsigned char> memory(size_t(size) * (SHARED_LIMIT + 2 * GUARD));
  cluster_count = launch.grid[0] / size * launch.grid[1] * launch.grid[2];
  for (next_cluster = 0; next_cluster < cluster_count;) {
    unsigned width = launch.grid[0] / size, x = next_cluster % width * size, y = next_cluster / width % launch.grid[1];
    unsigned z = next_cluster / width / launch.grid[1];
    ++next_cluster;
    taken = 0;
    if (statics) memset(__start_shared_memory, 0xff, statics);
    memset(memory.data(), 0xff, memory.size());
    cluster_barrier = {};
    blocks.assign(size, Block{});
    for (unsigned rank = 0; rank < size; ++rank) {
      Block &block = blocks[rank];
      block.index = {x + rank, y, z};
      block.rank = rank;
      uintptr_t start = uintptr_t(memory.data() + size_t(rank) * (SHARED_LIMIT + 2 * GUARD));
      block.dynamic = reinterpret_cast<unsigned char *>((start + GUARD - 1) / GUARD * GUARD);
      block.threads.resize(threads);
      block.warps.resize((threads + LANES - 1) / LANES);
      for (unsigned t = 0; t < threads; ++t) {
        Thread &thread = block.threads[t];
        thread.number = t;
        thread.index = {t % launch.block[0], t / launch.block[0] % launch.block[1],
                        t / launch.block[0] / launch.block[1]};
        thread.block = &block;
        thread.lane = t % LANES;
        thread.warp = t / LANES;
        thread.stack = stacks.data() + (size_t(rank) * threads + t) * STACK;
        ++block.warps[t / LANES].size;
      }
    }
    run_blocks();
    if (problem[0]) return problem;
    for (Block &block : blocks)
      for (unsigned i = 0; i < 256; ++i)
        if (block.dynamic[launch.shared + i] != 0xff) return "a block wrote beyond its dynamic shared memory";
  }
  return nullptr;
}

template <class... P, size_t... I> void unpack(void (*f)(P...), void **given, std::index_sequence<I...>) {
  f(*static_cast<std::decay_t<P> *>(given[I])...);
}
template <class... P> void call(void (*f)(P...), void **given) { unpack(f, given, std::index_sequence_for<P...>{}); }

}  // namespace emulator

#define threadIdx (emulator::current->index)
#define blockIdx (emulator::current->block->index)
#define blockDim (dim3{emulator::launch.block[0], emulator::launch.block[1], emulator::launch.block[2]})
#define gridDim (dim3{emulator::launch.grid[0], emulator::launch.grid[1], emulator::launch.grid[2]})

// Accesses of a whole warp whose bank conflicts are counted: as many wavefronts as rows of 32 banks that must follow one
// another. 16 bytes a lane go by eight lanes, 4 bytes a lane by 32. `order` says which lane is the i-th, for GPUs where
// lanes that go together are not neighbours.
namespace emulator {
struct Access { const void *place; };
inline void count_banks(const void *place, unsigned bytes, unsigned (*order)(unsigned) = nullptr) {
  Access own{place};
  auto run = [order](Warp &warp, unsigned bytes) {
    unsigned lanes = 128 / bytes;
    for (unsigned first = 0; first < warp.size; first += lanes) {
      std::vector<unsigned> words[32];
      unsigned most = 0;
      for (unsigned i = first; i < first + lanes; ++i) {
        unsigned lane = order ? order(i) : i;
        unsigned address = address_of(static_cast<Access *>(warp.slots[lane])->place);
        require(address % bytes == 0, "an access to shared memory that is not aligned");
        for (unsigned word = address / 4; word < (address + bytes) / 4; ++word) {
          std::vector<unsigned> &bank = words[word % 32];
          bool known = false;
          for (unsigned other : bank) known |= other == word;
          if (!known) bank.push_back(word);
          most = max(most, unsigned(bank.size()));
        }
      }
      ++access_count;
      wavefront_count += most;
    }
  };
  if (bytes == 16) together("a load of 16 bytes", &own, [&](Warp &warp) { run(warp, 16); });
  else together("an access of 4 bytes", &own, [&](Warp &warp) { run(warp, 4); });
}
}  // namespace emulator

inline void __syncthreads() {
  emulator::Block &block = *emulator::current->block;
  emulator::meet(block.barriers[0], unsigned(block.threads.size()), "__syncthreads");
}
inline void __syncwarp(unsigned = ~0u) { emulator::together("__syncwarp", nullptr, [](emulator::Warp &) {}); }

template <class T> T __shfl_xor_sync(unsigned, T value, int mask) {
  struct Trade { T given, taken; int mask; } trade{value, value, mask};
  emulator::together("__shfl_xor_sync", &trade, [](emulator::Warp &warp) {
    for (unsigned lane = 0; lane < warp.size; ++lane) {
      Trade &own = *static_cast<Trade *>(warp.slots[lane]);
      if ((lane ^ own.mask) < warp.size) own.taken = static_cast<Trade *>(warp.slots[lane ^ own.mask])->given;
    }
  });
  return trade.taken;
}

// The entry for Python: launches KERNEL. Returns null, or a sentence that says what is wrong.
#define EMULATE(KERNEL)                                                                                              \
  extern "C" __attribute__((visibility("default"))) const char *emulate(const emulator::Launch *launch, void **arguments) {                                 \
    return emulator::run(*launch, arguments, [](void **given) { emulator::call(KERNEL, given); });                   \
  }                                                                                                                  \
  extern "C" __attribute__((visibility("default"))) void counted(unsigned long *out) {                                                                      \
    out[0] = emulator::access_count; out[1] = emulator::wavefront_count; out[2] = emulator::tma_bytes;             \
  }
