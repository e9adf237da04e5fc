// A decoding step in one launch. Every block stays on its multiprocessor and runs its list of tasks; blocks tell each
// other by counters in memory what has ended. Or, where MARKED is 1, numbers tell by themselves that they are there: all
// bits of a place are set until a number is written to it, which happens once a step, and who needs the number reads the
// place again and again. No number that is written has all bits set: roundings give another NaN. A step uses one of two
// sets of such buffers, and fills the other one with marks for the next step. Some warps compute. One more streams the weights of all products of the
// list, and the keys and values of earlier steps, through a ring in shared memory: no task writes them, so it waits for
// no counter and is as far ahead as the ring is long, also while the others wait.
//
// Matrix instructions multiply 8 outputs' weights with the activations of up to 8 rows: mma.m16n8k16, whose 16 rows are
// the activations (the last 8 are zero) and whose 8 columns are outputs, so a block may own any number of outputs.
//
// Definitions: ROWS rows of the step, GROUP query heads of a key head, DIM width of a head, ROTATED numbers of it that
// rotate, WIDTH, ATTENDED and INNER inputs of the products, PAGE tokens of a block of the cache, SPLITS parts of a row's
// keys, JOINS 1 if products join them, MARKED 1 for buffers of marks, WARPS that compute, DEPTH inputs of a stage, STAGES of the ring, PAGES of the
// cache in a stage, SUM_TILES tiles between two sums over warps, MOST inputs in registers.
#include "ptx.cuh"

constexpr int WORKERS = 32 * WARPS, TILE = 8;
constexpr int PITCH = DEPTH + 32;  // numbers from row to row of a stage: two rows' 64 bytes lie in other banks
constexpr int STAGE_BYTES = TILE * PITCH * 2;
constexpr int TOKENS = PAGES * PAGE;  // of a stage with keys and values
constexpr float LOWEST = -1e30f, LOG2E = 1.4426950408889634f;

// Inputs whose activations are in registers together. More than MOST are taken one such slab after the other.
__device__ constexpr int slab_of(int inputs) {
  const int slabs = (inputs + MOST - 1) / MOST, stages = (inputs + DEPTH - 1) / DEPTH;
  return (stages + slabs - 1) / slabs * DEPTH;
}

enum Kind { EMBED, QKV, ATTEND, COMBINE, OUT, GATE_UP, DOWN, HEAD };

struct Record {  // of a task; records.py writes it
  int kind, first, last, inputs;  // of a product: outputs and inputs. Else first is the row and last the head
  int split, wait, least, signal;  // wait: a counter, or -1
  const bf16 *weight, *second;     // second: of the other half of a gated pair, or the residual to which is added
  const bf16 *norm, *bias;         // or null
  const bf16 *x;                   // where products join the parts of attention, and they are combined: these, in float
  bf16 *y;
  bf16 *keys, *values;             // of the layer's cache
  const bf16 *q_norm, *k_norm;     // or null
};

struct Step {
  const Record *records;
  const int *starts;  // by block, its first record; and one more
  unsigned *counters;  // and behind the last one that of blocks that have ended, and that of steps
  const long long *tokens, *positions;
  const int *table, *slots;   // a row's blocks are in its slot's part of the table
  const unsigned char *live;  // 0: a row without a request
  const float *cos_sin;
  const bf16 *embedding;
  unsigned char *marks;  // the marked buffers, twice
  long long *trace;  // null, or four numbers a record: cycles of its begin, of the end of its wait, of its end; and how
                     // many of them thread 0 waited for weights
  long long set_bytes;   // of the marked buffers, once
  long long block_step;  // numbers from block to block of the cache
  int counter_count, blocks, columns, heads, kv_heads, width, panel, records_room;
  float eps, head_eps, scale;
};

struct Shared {  // offsets into dynamic shared memory
  Mbarrier *full, *empty;
  Record *records;
  float *squares;  // [2][WARPS][8]: of a warp's inputs, by row
  float *sums;     // [2][SUM_TILES][WARPS][ROWS][TILE]
  bf16 *panel;     // what attention needs, or activations that are made of its parts
  unsigned char *ring;
};

struct Ring {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// Which of two places in shared memory is next: of sums, and of sums of squares. While some warps read one of them,
// others may be a task ahead, but not two, since they meet in every task.
struct Turns { int sums = 0, squares = 0; };

struct __align__(16) Eight { bf16 at[8]; };

__device__ __forceinline__ Eight eight_of(uint4 words) {
  Eight e;
  memcpy(&e, &words, 16);
  return e;
}
__device__ __forceinline__ float rounded(float x) { return to_float(__float2bfloat16(x)); }

// ---- Numbers that blocks give each other ----------------------------------------------------------------------------

// True if one of eight numbers is not there yet.
__device__ __forceinline__ bool lacks_one(uint4 v) {
  // The upper bit of a half of u & w is set if all bits of that half of w are, or the lower half's are
  const unsigned w[4] = {v.x, v.y, v.z, v.w};
  unsigned found = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) found |= (~w[i] - 0x00010001u) & w[i];
  return found & 0x80008000u;
}

// Numbers as they are in memory at this moment, and not in the caches of the multiprocessor.
__device__ __forceinline__ uint4 load_now(const void *from) {
#ifdef __CUDACC__
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
#else
  return load_fresh(from);
#endif
}
__device__ __forceinline__ unsigned short half_now(const void *from) {
#ifdef __CUDACC__
  unsigned short v;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(from) : "memory");
  return v;
#else
  return *static_cast<const unsigned short *>(from);
#endif
}

// Wait until all these eights are there. Those that are not `taken` are zeros.
template <int COUNT, class Taken>
__device__ __forceinline__ void await(uint4 (&x)[COUNT], const bf16 *from, int apart, Taken taken) {
#ifndef __CUDACC__
  emulator::block_until("numbers of other blocks", [&] {
    for (int j = 0; j < COUNT; ++j)
      if (taken(j) && lacks_one(load_fresh(from + j * apart))) return false;
    return true;
  });
#endif
#pragma unroll
  for (int j = 0; j < COUNT; ++j)
    if (taken(j)) x[j] = load_now(from + j * apart);
#ifdef __CUDACC__
  // All blocks wait for the same numbers at once, so a lane asks for one that it lacks until that is there
  constexpr unsigned LANES_WITH_ROWS = ROWS == 8 ? ~0u : (1u << 4 * ROWS) - 1;
  for (;;) {
    const bf16 *missing = nullptr;
#pragma unroll
    for (int j = 0; j < COUNT; ++j)
      if (taken(j) && lacks_one(x[j])) missing = from + j * apart;
    if (!__any_sync(LANES_WITH_ROWS, missing != nullptr)) break;
    while (__any_sync(LANES_WITH_ROWS, missing && lacks_one(load_now(missing)))) {}
#pragma unroll
    for (int j = 0; j < COUNT; ++j)
      if (taken(j) && lacks_one(x[j])) x[j] = load_now(from + j * apart);
  }
#endif
}

// One number, which another block may have written in this step.
__device__ __forceinline__ float fresh_one(const bf16 *from) {
#ifdef __CUDACC__
  unsigned short bits = MARKED ? half_now(from) : __ldcg(reinterpret_cast<const unsigned short *>(from));
  if (MARKED)
    while (bits == 0xffff) bits = half_now(from);
  return to_float(__ushort_as_bfloat16(bits));
#else
  if (MARKED) emulator::block_until("a number of another block", [&] { return half_now(from) != 0xffff; });
  return to_float(*from);
#endif
}

// Write what other blocks wait for.
__device__ __forceinline__ void give(bf16 *to, float number) {
  const bf16 rounded = __float2bfloat16(number);
#ifdef __CUDACC__
  if (MARKED) asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(to), "h"(__bfloat16_as_ushort(rounded)) : "memory");
  else *to = rounded;
#else
  *to = rounded, ++emulator::progress;
#endif
}
__device__ __forceinline__ void give(float *to, float number) {
  const unsigned no_number = 0x7fffffffu;
  float plain = number;
  if (number != number) memcpy(&plain, &no_number, 4);
#ifdef __CUDACC__
  if (MARKED) asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(to), "f"(plain) : "memory");
  else *to = plain;
#else
  *to = plain, ++emulator::progress;
#endif
}

__device__ __forceinline__ long long now(const Step &step) { return step.trace ? cycles() : 0; }
__device__ __forceinline__ void workers_meet() { named_barrier(1, WORKERS); }

__device__ __forceinline__ bool is_product(int kind) { return kind == QKV || kind >= OUT; }

// ---- The streaming warp ---------------------------------------------------------------------------------------------

struct Tokens { int start, stop, old; };

__device__ __forceinline__ int position_of(const Step &step, int row) {
  return step.live[row] ? int(step.positions[row]) : -1;
}
__device__ __forceinline__ const int *table_of(const Step &step, int row) {
  return step.table + (long long)step.slots[row] * step.columns;
}

// The tokens of a row that a task attends to: none of a row without a request. Those before `old` are in the cache.
__device__ __forceinline__ Tokens tokens_of(const Record &task, int position) {
  const int pages = (position + PAGE) / PAGE, own = (pages + SPLITS - 1) / SPLITS;
  const int stop = min(position + 1, (task.split + 1) * own * PAGE);
  return {task.split * own * PAGE, stop, min(stop, position)};
}

__device__ void stream_keys(const Step &step, const Shared &shared, const Record &task, Ring &ring) {
  const int lane = threadIdx.x % 32, page = lane % PAGES;
  const auto [start, stop, old] = tokens_of(task, position_of(step, task.first));
  const int *table = table_of(step, task.first);
  const bf16 *from = (lane < PAGES ? task.keys : task.values) + (long long)task.last * PAGE * DIM;
  constexpr int BYTES = PAGE * DIM * 2;
#pragma unroll 1
  for (int base = start; base < old; base += TOKENS) {
    const int pages = min(PAGES, (old - base + PAGE - 1) / PAGE);
    const bool loads = lane < 2 * PAGES && page < pages;
    const long long place = loads ? table[base / PAGE + page] * step.block_step : 0;
    mbarrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
    if (lane == 0) mbarrier_expect(&shared.full[ring.stage], 2 * pages * BYTES);
    __syncwarp();
    if (loads) bulk_load(shared.ring + ring.stage * STAGE_BYTES + lane * BYTES, from + place, BYTES, &shared.full[ring.stage]);
    ring.next();
  }
}

__device__ void stream_weights(const Shared &shared, const Record &task, Ring &ring) {
  const int lane = threadIdx.x % 32, inputs = task.inputs;
  const bool pair = task.kind == GATE_UP;
  const int each = pair ? TILE / 2 : TILE, slot = pair ? lane % 4 : lane;
  const int slab = slab_of(inputs);
#pragma unroll 1
  for (int chunk = task.first; chunk < task.last; chunk += each * SUM_TILES)
#pragma unroll 1
    for (int begin = 0; begin < inputs; begin += slab)
#pragma unroll 1
      for (int first = chunk; first < min(task.last, chunk + each * SUM_TILES); first += each) {
        const int outputs = min(each, task.last - first), rows = pair ? 2 * outputs : outputs;
        const bool loads = lane < TILE && slot < outputs;
        const bf16 *row = (pair && lane >= 4 ? task.second : task.weight) + (long long)(first + slot) * inputs;
#pragma unroll 1
        for (int k = begin; k < min(inputs, begin + slab); k += DEPTH) {
          const int bytes = min(DEPTH, inputs - k) * 2;
          mbarrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
          if (lane == 0) mbarrier_expect(&shared.full[ring.stage], rows * bytes);
          __syncwarp();
          if (loads)
            bulk_load(shared.ring + ring.stage * STAGE_BYTES + lane * PITCH * 2, row + k, bytes,
                      &shared.full[ring.stage]);
          ring.next();
        }
      }
}

__device__ void stream(const Step &step, const Shared &shared, int count) {
  Ring ring;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const Record &task = shared.records[i];
    if (is_product(task.kind)) stream_weights(shared, task, ring);
    else if (task.kind == ATTEND) stream_keys(step, shared, task, ring);
  }
}

// ---- Joining the parts of attention ---------------------------------------------------------------------------------

constexpr int PART = DIM + 4;  // of a partial result: sums, the largest score, the sum of weights, and two unused

struct __align__(16) Parts { float at[8]; };

__device__ __forceinline__ bool lacks_float(uint4 v) {
  return v.x == ~0u || v.y == ~0u || v.z == ~0u || v.w == ~0u;
}

// Eight numbers of a head's result, made of those of its splits. Scores are powers of 2.
__device__ __forceinline__ Eight joined(const float *partial, long long head, int d) {
  const float *parts = partial + head * SPLITS * PART;
  float tops[SPLITS], totals[SPLITS], top = LOWEST, weights = 0;
  Parts sums[SPLITS];
#ifndef __CUDACC__
  if (MARKED)
    emulator::block_until("parts of attention", [&] {
      for (int s = 0; s < SPLITS; ++s) {
        const float *part = parts + s * PART;
        const uint4 both = load_fresh(part + DIM);
        if (both.x == ~0u || both.y == ~0u) return false;
        if (lacks_float(load_fresh(part + d)) || lacks_float(load_fresh(part + d + 4))) return false;
      }
      return true;
    });
#endif
  uint4 low[SPLITS], high[SPLITS], both[SPLITS];
  bool lacks;
  do {
    do {  // a few numbers first: all blocks ask at once
      lacks = false;
#pragma unroll
      for (int s = 0; s < SPLITS; ++s) both[s] = load_now(parts + s * PART + DIM);
#pragma unroll
      for (int s = 0; s < SPLITS; ++s) lacks |= both[s].x == ~0u || both[s].y == ~0u;
    } while (MARKED && PTX(lacks, false));
#pragma unroll
    for (int s = 0; s < SPLITS; ++s) {
      const float *part = parts + s * PART;
      low[s] = load_now(part + d), high[s] = load_now(part + d + 4);
    }
#pragma unroll
    for (int s = 0; s < SPLITS; ++s) lacks |= lacks_float(low[s]) || lacks_float(high[s]);
  } while (MARKED && PTX(lacks, false));  // the emulator has waited
#pragma unroll
  for (int s = 0; s < SPLITS; ++s) {
    memcpy(&tops[s], &both[s].x, 4), memcpy(&totals[s], &both[s].y, 4);
    memcpy(sums[s].at, &low[s], 16), memcpy(sums[s].at + 4, &high[s], 16);
  }
#pragma unroll
  for (int s = 0; s < SPLITS; ++s) top = max(top, tops[s]);
  float all[8] = {};
#pragma unroll
  for (int s = 0; s < SPLITS; ++s) {
    const float weight = power_of_2(tops[s] - top);
    weights += totals[s] * weight;
#pragma unroll
    for (int j = 0; j < 8; ++j) all[j] += sums[s].at[j] * weight;
  }
  const float share = weights > 0 ? inverse(weights) : 0.f;
  Eight result;
#pragma unroll
  for (int j = 0; j < 8; ++j) result.at[j] = __float2bfloat16(all[j] * share);
  return result;
}

// ---- The wait of a task ---------------------------------------------------------------------------------------------

struct Clock { long long ready, waited; };  // cycles of the end of a task's wait, and of waits for the ring

// Wait until the task may begin. What no task writes is asked for before.
__device__ __forceinline__ void begin(const Step &step, const Record &task, Clock &clock) {
  if (MARKED) return;
  if (task.wait >= 0 && threadIdx.x == 0) wait_for_counter(step.counters + task.wait, task.least);
  workers_meet();
}

__device__ __forceinline__ void wait_for_stage(const Step &step, const Shared &shared, const Ring &ring, Clock &clock) {
  clock.waited -= now(step);
  mbarrier_wait(&shared.full[ring.stage], ring.parity);
  clock.waited += now(step);
}

// Give back a stage that this warp has read. The loads may still be under way, and an arrival holds back no copy, which
// is of the asynchronous proxy: without the fence weights of other stages were multiplied.
__device__ __forceinline__ void free_stage(const Shared &shared, Ring &ring) {
  fence_for_tma();
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared.empty[ring.stage]);
  ring.next();
}

// ---- Products -------------------------------------------------------------------------------------------------------
// A warp has 32 of every STEP inputs of a product. A lane has 8 of these 32: lane % 4 says which, and lane / 4 of which
// row. Both operands of a matrix instruction are taken in this order, so a lane reads 16 bytes of either, and the
// activations stay in its registers. The warps' sums meet once, behind up to SUM_TILES tiles.
//
// Where a norm comes first, the activations are only multiplied by its weights. Its scale is that of a whole row, so it
// is applied to the sums.

constexpr int STEP = 32 * WARPS;

// True if an input is there, which need not be asked where no step is short.
template <int INPUTS> __device__ __forceinline__ bool is_inside(int k) { return INPUTS % STEP == 0 || k < INPUTS; }

template <int INPUTS, bool JOINED, int COUNT>
__device__ __forceinline__ void load_inputs(const Step &step, const Shared &shared, const Record &task, int begin,
                                            uint4 (&x)[COUNT]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4;
  const int own = begin + warp * 32 + lane % 4 * 8;  // and every STEP behind it
  if (JOINED) {
    if (MARKED) workers_meet();  // no warp reads any more what an attention left there
#pragma unroll 1
    for (int r = 0; r < ROWS; ++r)
#pragma unroll 1
      for (int k = begin + (lane / 4 * WARPS + warp) * 32 + lane % 4 * 8; k < min(INPUTS, begin + COUNT * STEP);
           k += 8 * STEP)
        *reinterpret_cast<Eight *>(shared.panel + r * INPUTS + k) =
            joined(reinterpret_cast<const float *>(task.x), (long long)r * step.heads + k / DIM, k % DIM);
    __syncwarp();
  }
#pragma unroll
  for (int j = 0; j < COUNT; ++j) x[j] = {0, 0, 0, 0};
  if (row >= ROWS) return;
  const bf16 *from = (JOINED ? shared.panel : task.x) + (long long)row * INPUTS + own;
  if (MARKED && !JOINED) return await(x, from, STEP, [&](int j) { return is_inside<INPUTS>(own + j * STEP); });
#pragma unroll
  for (int j = 0; j < COUNT; ++j)
    if (is_inside<INPUTS>(own + j * STEP))
      x[j] = JOINED ? *reinterpret_cast<const uint4 *>(from + j * STEP) : load_fresh(from + j * STEP);
}

// Multiply by a norm's weights, and return the sum of the squares.
template <int COUNT>
__device__ __forceinline__ float weighted(uint4 (&x)[COUNT], const uint4 (&weights)[COUNT]) {
  float squares = 0;
#pragma unroll
  for (int j = 0; j < COUNT; ++j) {
    Eight numbers = eight_of(x[j]);
    const Eight weight = eight_of(weights[j]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float number = to_float(numbers.at[i]);
      squares += number * number;
      numbers.at[i] = __float2bfloat16(number * to_float(weight.at[i]));
    }
    memcpy(&x[j], &numbers, 16);
  }
  return squares;
}

// Add up the warps' sums of tiles, and write their outputs. residual: of this thread's first one.
template <int INPUTS, bool NORMED>
__device__ __forceinline__ void finish(const Step &step, const float *all_squares, const Record &task,
                                       const float *sums, int first, int tiles, float residual) {
  const bool pair = NORMED && task.kind == GATE_UP;
  const int wide = pair ? 4 : 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < tiles * ROWS * wide; i += WORKERS) {
    const int n = i % wide, row = i / wide % ROWS, tile = i / wide / ROWS, output = first + tile * wide + n;
    if (output >= task.last) continue;
    const float *from = sums + (tile * WARPS * ROWS + row) * TILE + n;
    float sum = 0, up = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      sum += from[warp * ROWS * TILE];
      if (pair) up += from[warp * ROWS * TILE + 4];
    }
    if (!NORMED) {
      const long long at = (long long)row * step.width + output;
      const bool first_one = i == int(threadIdx.x) && first == task.first;
      give(task.y + at, (first_one ? residual : fresh_one(task.second + at)) + rounded(sum));
      continue;
    }
    float squares = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) squares += all_squares[warp * 8 + row];
    const float scale = inverse_root(squares / INPUTS + step.eps);
    sum *= scale;
    if (pair) sum *= inverse(1.f + power_of_2(-LOG2E * sum)) * (up * scale);
    else if (task.bias) sum += to_float(task.bias[output]);
    give(task.y + (long long)row * task.split + output, sum);  // split: here the width of y
  }
}

// Read a lane's weights of the next stage, which begin at this input, and give the stage back. at: the lane's place there.
template <int INPUTS>
__device__ __forceinline__ void load_stage(const Step &step, const Shared &shared, int at, int begin, Ring &ring,
                                           Clock &clock, uint4 (&w)[DEPTH / STEP]) {
  wait_for_stage(step, shared, ring, clock);
  const bf16 *weights = reinterpret_cast<const bf16 *>(shared.ring + ring.stage * STAGE_BYTES) + at;
#pragma unroll
  for (int j = 0; j < DEPTH / STEP; ++j)
    w[j] = is_inside<INPUTS>(begin + j * STEP + int(threadIdx.x) / 32 * 32)
               ? *reinterpret_cast<const uint4 *>(weights + j * STEP)
               : uint4{0, 0, 0, 0};
  free_stage(shared, ring);
}

template <int INPUTS, bool NORMED, bool JOINED = false>
__device__ __forceinline__ void multiply(const Step &step, const Shared &shared, const Record &task, Ring &ring,
                                         Turns &turns, Clock &clock) {
  constexpr int SLAB = slab_of(INPUTS), WIDE = SLAB < INPUTS ? SLAB : INPUTS, COUNT = (WIDE + STEP - 1) / STEP;
  static_assert(!NORMED || SLAB >= INPUTS, "a norm's scale is known once all inputs are loaded");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4;
  const int each = NORMED && task.kind == GATE_UP ? TILE / 2 : TILE;
  const int at = row * PITCH + warp * 32 + lane % 4 * 8;
  float residual = 0;
  float *own_squares = shared.squares + turns.squares * WARPS * 8;
  uint4 x[COUNT];
  if (NORMED) {
    turns.squares ^= 1;
    uint4 weights[COUNT];
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      const int k = warp * 32 + lane % 4 * 8 + j * STEP;
      weights[j] = is_inside<INPUTS>(k) ? load_fresh(task.norm + k) : uint4{0, 0, 0, 0};
    }
    begin(step, task, clock);
    load_inputs<INPUTS, JOINED>(step, shared, task, 0, x);
    float squares = weighted(x, weights);
    squares += __shfl_xor_sync(~0u, squares, 1);
    squares += __shfl_xor_sync(~0u, squares, 2);
    if (lane % 4 == 0) own_squares[warp * 8 + row] = squares;
  } else {
    begin(step, task, clock);
    const int n = threadIdx.x % TILE, own = threadIdx.x / TILE % ROWS, tile = threadIdx.x / TILE / ROWS;
    const int output = task.first + tile * TILE + n;
    if (output < task.last && tile < SUM_TILES) residual = fresh_one(task.second + (long long)own * step.width + output);
    if (SLAB >= INPUTS) load_inputs<INPUTS, JOINED>(step, shared, task, 0, x);
  }
  __syncwarp();  // lanes may have waited for unlike times, and matrix instructions want them together
  clock.ready = now(step);
#pragma unroll 1
  for (int first = task.first; first < task.last; first += each * SUM_TILES, turns.sums ^= 1) {
    const int tiles = min(SUM_TILES, (task.last - first + each - 1) / each);
    float *sums = shared.sums + turns.sums * SUM_TILES * WARPS * ROWS * TILE;
#pragma unroll 1
    for (int begin = 0; begin < INPUTS; begin += SLAB) {
      if (SLAB < INPUTS) {
        load_inputs<INPUTS, JOINED>(step, shared, task, begin, x);
        __syncwarp();
      }
      uint4 next[DEPTH / STEP];
      load_stage<INPUTS>(step, shared, at, begin, ring, clock, next);
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) {
        float found[4][4] = {};  // of every fourth 16 inputs, so that instructions need not wait for each other
#pragma unroll
        for (int start = 0; start < WIDE; start += DEPTH) {
          if (SLAB < INPUTS && begin + start >= INPUTS) break;
          uint4 w[DEPTH / STEP];
#pragma unroll
          for (int j = 0; j < DEPTH / STEP; ++j) w[j] = next[j];
          // The next stage is read while this one is multiplied
          if (start + DEPTH < WIDE && begin + start + DEPTH < INPUTS)
            load_stage<INPUTS>(step, shared, at, begin + start + DEPTH, ring, clock, next);
          else if (tile + 1 < tiles)
            load_stage<INPUTS>(step, shared, at, begin, ring, clock, next);
#pragma unroll
          for (int j = 0; j < DEPTH / STEP; ++j) {
            if (start / STEP + j >= COUNT) continue;
            const uint4 &own = x[start / STEP + j];
            const unsigned a[4] = {own.x, 0, own.y, 0}, c[4] = {own.z, 0, own.w, 0};
            const unsigned b[4] = {w[j].x, w[j].y, w[j].z, w[j].w};
            mma_m16n8k16(found[j % 2 * 2], a, b);
            mma_m16n8k16(found[j % 2 * 2 + 1], c, b + 2);
          }
        }
        if (row < ROWS) {
          float *own = sums + ((tile * WARPS + warp) * ROWS + row) * TILE + lane % 4 * 2;
          float a = found[0][0] + found[1][0] + (found[2][0] + found[3][0]);
          float b = found[0][1] + found[1][1] + (found[2][1] + found[3][1]);
          if (SLAB < INPUTS && begin) a += own[0], b += own[1];
          own[0] = a, own[1] = b;
        }
      }
    }
    workers_meet();
    finish<INPUTS, NORMED>(step, own_squares, task, sums, first, tiles, residual);
  }
}

// ---- Attention ------------------------------------------------------------------------------------------------------
// Keys and values of earlier steps come through the ring as well, pages as they lie in the cache. Only the row's newest
// token is made here.

constexpr int LANES = DIM / 8;           // that share a token
constexpr int AT_ONCE = 32 / LANES;      // tokens of a warp at once
constexpr int GROUPS = WARPS * AT_ONCE;  // tokens of a block at once
constexpr int EACH = (TOKENS + GROUPS - 1) / GROUPS;  // tokens of a stage that a group of lanes has

constexpr int OWN = DIM / 32, TURNS = (ROTATED / 2 + 31) / 32;

// What a lane needs to normalise and rotate a head, and no task writes.
struct HeadWeights { float norm[OWN], cosine[TURNS + 1], sine[TURNS + 1]; };

__device__ __forceinline__ HeadWeights head_weights(const Step &step, const bf16 *norm, int position) {
  const int lane = threadIdx.x % 32;
  const float *angles = step.cos_sin + (long long)max(position, 0) * ROTATED;
  HeadWeights found;
#pragma unroll
  for (int i = 0; i < OWN; ++i) found.norm[i] = norm ? fresh_one(norm + lane + 32 * i) : 1.f;
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const bool turns = lane + 32 * i < ROTATED / 2;
    found.cosine[i] = turns ? angles[lane + 32 * i] : 1.f;
    found.sine[i] = turns ? angles[lane + 32 * i + ROTATED / 2] : 0.f;
  }
  return found;
}

// Normalise and rotate a head into `to`, rounded as the engine rounds it. A warp does it.
__device__ __forceinline__ void prepare_head(const Step &step, const bf16 *from, const HeadWeights &head, bool normed,
                                             float *to) {
  const int lane = threadIdx.x % 32;
  float x[OWN], squares = 0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) x[i] = fresh_one(from + lane + 32 * i);
#pragma unroll
  for (int i = 0; i < OWN; ++i) squares += x[i] * x[i];
  if (normed) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) squares += __shfl_xor_sync(~0u, squares, mask);
    const float scale = inverse_root(squares / DIM + step.head_eps);
#pragma unroll
    for (int i = 0; i < OWN; ++i) x[i] = rounded(x[i] * scale * head.norm[i]);
  }
#pragma unroll
  for (int i = 0; i < OWN; ++i) to[lane + 32 * i] = x[i];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int at = lane + 32 * i;
    if (at >= ROTATED / 2) continue;
    const float a = to[at], b = to[at + ROTATED / 2];
    to[at] = rounded(a * head.cosine[i] - b * head.sine[i]);
    to[at + ROTATED / 2] = rounded(b * head.cosine[i] + a * head.sine[i]);
  }
}

// What a group of lanes knows of a query head: sums of 8 columns, the largest score, and the sum of weights.
struct Attended { float sums[8], top, total; };

// Attend to tokens together.
template <int COUNT>
__device__ __forceinline__ void absorb(Attended (&heads)[GROUP], const float (&queries)[GROUP][8],
                                       const Eight (&keys)[COUNT], const Eight (&values)[COUNT],
                                       const bool (&seen)[COUNT]) {
  float scores[COUNT][GROUP];
#pragma unroll
  for (int u = 0; u < COUNT; ++u)
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      float even = 0, odd = 0;
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        even += queries[i][j] * to_float(keys[u].at[j]);
        odd += queries[i][j + 1] * to_float(keys[u].at[j + 1]);
      }
      scores[u][i] = even + odd;
    }
#pragma unroll
  for (int mask = LANES / 2; mask; mask /= 2)
#pragma unroll
    for (int u = 0; u < COUNT; ++u)
#pragma unroll
      for (int i = 0; i < GROUP; ++i) scores[u][i] += __shfl_xor_sync(~0u, scores[u][i], mask);
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    float top = heads[i].top;
#pragma unroll
    for (int u = 0; u < COUNT; ++u) top = seen[u] ? max(top, scores[u][i]) : top;
    const float kept = power_of_2(heads[i].top - top);
    heads[i].top = top, heads[i].total *= kept;
#pragma unroll
    for (int j = 0; j < 8; ++j) heads[i].sums[j] *= kept;
#pragma unroll
    for (int u = 0; u < COUNT; ++u) {
      const float weight = seen[u] ? power_of_2(scores[u][i] - top) : 0.f;
      heads[i].total += weight;
#pragma unroll
      for (int j = 0; j < 8; ++j) heads[i].sums[j] += weight * to_float(values[u].at[j]);
    }
  }
}

__device__ __forceinline__ void attend(const Step &step, const Shared &shared, const Record &task, Ring &ring,
                                       Clock &clock) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = task.first, head = task.last;
  const int position = position_of(step, row);
  float *q = reinterpret_cast<float *>(shared.panel), *key = q + GROUP * DIM, *parts = key + DIM;
  bf16 *fresh_key = reinterpret_cast<bf16 *>(parts + WARPS * GROUP * PART), *fresh_value = fresh_key + DIM;
  const auto [start, stop, old] = tokens_of(task, position);
  const bool newest = start < stop && stop == position + 1;
  const long long place = newest ? table_of(step, row)[position / PAGE] * step.block_step +
                                       (long long)(head * PAGE + position % PAGE) * DIM
                                 : 0;
  const bf16 *projected = task.x + (long long)row * (step.heads + 2 * step.kv_heads) * DIM;
  HeadWeights own_weights = head_weights(step, warp == GROUP ? task.k_norm : task.q_norm, position);
  begin(step, task, clock);
#pragma unroll 1
  for (int i = warp; i < (start < stop ? GROUP + newest : 0); i += WARPS) {  // behind the queries the new key
    if (i == GROUP && warp != GROUP) own_weights = head_weights(step, task.k_norm, position);
    const bf16 *from = projected + (i < GROUP ? head * GROUP + i : step.heads + head) * DIM;
    float value[OWN];
#pragma unroll
    for (int j = 0; j < OWN; ++j)
      value[j] = i == GROUP ? fresh_one(projected + (step.heads + step.kv_heads + head) * DIM + lane + 32 * j) : 0.f;
    prepare_head(step, from, own_weights, task.q_norm, q + i * DIM);
    if (i < GROUP) continue;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      const int at = lane + 32 * j;
      fresh_key[at] = __float2bfloat16(key[at]), fresh_value[at] = __float2bfloat16(value[j]);
      task.keys[place + at] = fresh_key[at], task.values[place + at] = fresh_value[at];
    }
  }
  workers_meet();
  clock.ready = now(step);
  Attended heads[GROUP];
  float queries[GROUP][8];
  const int column = lane % LANES * 8, own = warp * AT_ONCE + lane / LANES;
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    heads[i] = {{}, LOWEST, 0};
#pragma unroll
    for (int j = 0; j < 8; ++j) queries[i][j] = start < stop ? q[i * DIM + column + j] * (step.scale * LOG2E) : 0.f;
  }
#pragma unroll 1
  for (int base = start; base < old; base += TOKENS) {
    Eight keys[EACH], values[EACH];
    bool seen[EACH];
    const int last = min(TOKENS, old - base) - 1;
    wait_for_stage(step, shared, ring, clock);
    const bf16 *stage = reinterpret_cast<const bf16 *>(shared.ring + ring.stage * STAGE_BYTES) + column;
#pragma unroll
    for (int u = 0; u < EACH; ++u) {
      const int token = u * GROUPS + own;
      seen[u] = token <= last;
      const bf16 *from = stage + min(token, last) * DIM;
      keys[u] = *reinterpret_cast<const Eight *>(from);
      values[u] = *reinterpret_cast<const Eight *>(from + TOKENS * DIM);
    }
    free_stage(shared, ring);
    absorb(heads, queries, keys, values, seen);
  }
  if (newest && warp == 0) {
    const Eight keys[1] = {*reinterpret_cast<const Eight *>(fresh_key + column)};
    const Eight values[1] = {*reinterpret_cast<const Eight *>(fresh_value + column)};
    const bool seen[1] = {own == 0};
    absorb(heads, queries, keys, values, seen);
  }
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    float top = heads[i].top;
#pragma unroll
    for (int mask = LANES; mask < 32; mask *= 2) top = max(top, __shfl_xor_sync(~0u, top, mask));
    const float kept = power_of_2(heads[i].top - top);
    heads[i].total *= kept;
#pragma unroll
    for (int j = 0; j < 8; ++j) heads[i].sums[j] *= kept;
#pragma unroll
    for (int mask = LANES; mask < 32; mask *= 2) {
      heads[i].total += __shfl_xor_sync(~0u, heads[i].total, mask);
#pragma unroll
      for (int j = 0; j < 8; ++j) heads[i].sums[j] += __shfl_xor_sync(~0u, heads[i].sums[j], mask);
    }
    float *part = parts + (warp * GROUP + i) * PART;
    if (lane < LANES)
#pragma unroll
      for (int j = 0; j < 8; ++j) part[column + j] = heads[i].sums[j];
    if (lane == 0) part[DIM] = top, part[DIM + 1] = heads[i].total;
  }
  workers_meet();
#pragma unroll 1
  for (int at = threadIdx.x; at < GROUP * DIM; at += WORKERS) {
    const int i = at / DIM, d = at % DIM;
    float top = LOWEST, sum = 0, weights = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = max(top, parts[(w * GROUP + i) * PART + DIM]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float *part = parts + (w * GROUP + i) * PART, weight = power_of_2(part[DIM] - top);
      sum += part[d] * weight, weights += part[DIM + 1] * weight;
    }
    const long long place = (long long)row * step.heads + head * GROUP + i;
    if (SPLITS == 1) {
      give(task.y + place * DIM + d, weights > 0 ? sum * inverse(weights) : 0.f);
    } else {
      float *to = reinterpret_cast<float *>(task.y) + (place * SPLITS + task.split) * PART;
      give(to + d, sum);
      if (d == 0) give(to + DIM, top), give(to + DIM + 1, weights);
    }
  }
}

__device__ void combine(const Step &step, const Record &task) {
#pragma unroll 1
  for (int at = threadIdx.x * 8; at < GROUP * DIM; at += WORKERS * 8) {
    const long long head = (long long)task.first * step.heads + task.last * GROUP + at / DIM;
    const Eight eight = joined(reinterpret_cast<const float *>(task.x), head, at % DIM);
    for (int i = 0; i < 8; ++i) give(task.y + head * DIM + at % DIM + i, to_float(eight.at[i]));
  }
}

__device__ void embed(const Step &step, const Record &task) {
  const bf16 *from = step.embedding + step.tokens[task.first] * step.width;
  for (int i = threadIdx.x; i < step.width; i += WORKERS)
    give(task.y + (long long)task.first * step.width + i, to_float(from[i]));
}

// ---- The list -------------------------------------------------------------------------------------------------------

__device__ void work(const Step &step, const Shared &shared, int count) {
  Ring ring;
  Turns turns;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const Record &task = shared.records[i];
    const long long began = now(step);
    Clock clock = {};
    if (task.kind == ATTEND) {
      attend(step, shared, task, ring, clock);
    } else if (task.kind == OUT) {
      multiply<ATTENDED, false, JOINS>(step, shared, task, ring, turns, clock);
    } else if (task.kind == DOWN) {
      multiply<INNER, false>(step, shared, task, ring, turns, clock);
    } else if (is_product(task.kind)) {
      multiply<WIDTH, true>(step, shared, task, ring, turns, clock);
    } else {
      begin(step, task, clock);
      clock.ready = now(step);
      if (task.kind == COMBINE) combine(step, task);
      else embed(step, task);
    }
    if (!MARKED) workers_meet();
    if (task.signal >= 0 && threadIdx.x == 0) signal_counter(step.counters + task.signal);
    if (step.trace && threadIdx.x == 0) {
      long long *to = step.trace + 4ll * (step.starts[blockIdx.x] + i);
      to[0] = began, to[1] = clock.ready, to[2] = now(step), to[3] = clock.waited;
    }
  }
  if (MARKED) workers_meet();
  if (threadIdx.x == 0) {  // the last block to end makes the counters ready for the next launch
    unsigned *ended = step.counters + step.counter_count;
    if (add_to_counter(ended) + 1 == unsigned(step.blocks)) {
      for (int i = 0; i <= step.counter_count; ++i) step.counters[i] = 0;
      ++ended[1];
    }
  }
}

__device__ __forceinline__ bool is_marked(const Step &step, const bf16 *at) {
  const long long place = reinterpret_cast<const unsigned char *>(at) - step.marks;
  return at && place >= 0 && place < step.set_bytes;
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32, 1) persistent(const __grid_constant__ Step step) {
  unsigned char *memory = dynamic_shared();
  Shared shared;
  shared.ring = memory;
  shared.full = reinterpret_cast<Mbarrier *>(memory + STAGES * STAGE_BYTES);
  shared.empty = shared.full + STAGES;
  shared.squares = reinterpret_cast<float *>(shared.empty + STAGES);
  shared.sums = shared.squares + 2 * WARPS * 8;
  shared.panel = reinterpret_cast<bf16 *>(shared.sums + 2 * SUM_TILES * WARPS * ROWS * TILE);
  shared.records = reinterpret_cast<Record *>(reinterpret_cast<unsigned char *>(shared.panel) + step.panel);
  const int first = step.starts[blockIdx.x], count = step.starts[blockIdx.x + 1] - first;
  const uint4 *from = reinterpret_cast<const uint4 *>(step.records + first);
  for (int i = threadIdx.x; i < count * int(sizeof(Record) / 16); i += WORKERS + 32)
    reinterpret_cast<uint4 *>(shared.records)[i] = from[i];
  if (MARKED) {
    const long long own = step.counters[step.counter_count + 1] % 2 * step.set_bytes, other = step.set_bytes - own;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += WORKERS + 32) {  // addresses are those of the first set
      Record &task = shared.records[i];
      if (is_marked(step, task.x)) task.x += own / 2;
      if (is_marked(step, task.y)) task.y += own / 2;
      if (is_marked(step, task.second)) task.second += own / 2;
    }
    for (long long i = blockIdx.x * (WORKERS + 32ll) + threadIdx.x; i < step.set_bytes / 16; i += step.blocks * (WORKERS + 32ll))
      reinterpret_cast<uint4 *>(step.marks + other)[i] = {~0u, ~0u, ~0u, ~0u};
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) mbarrier_init(&shared.full[i], 1), mbarrier_init(&shared.empty[i], WARPS);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < WORKERS) work(step, shared, count);
  else stream(step, shared, count);
}
