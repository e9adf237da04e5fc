// A decoding step in one launch. Every block stays on its multiprocessor and runs its list of tasks; blocks tell each
// other by counters in memory what has ended. Eight warps compute. A ninth one streams the weights of all products of
// the list through a ring in shared memory: weights never change, so it waits for no counter and is as far ahead as the
// ring is long, also while the others wait.
//
// Matrix instructions multiply 8 outputs' weights with the activations of up to 8 rows: mma.m16n8k16, whose 16 rows are
// the activations (the last 8 are zero) and whose 8 columns are outputs, so a block may own any number of outputs.
//
// Definitions: ROWS rows of the step, GROUP query heads of a key head, DIM width of a head, ROTATED numbers of it that
// rotate, PAGE tokens of a block of the cache, SPLITS parts of a row's keys, DEPTH inputs of a stage, STAGES of the ring.
#include "ptx.cuh"

constexpr int WARPS = 8, WORKERS = 32 * WARPS, TILE = 8;
constexpr int PITCH = DEPTH + 8;  // numbers from row to row of a stage: rows begin in other banks
constexpr int STAGE_BYTES = TILE * PITCH * 2;
constexpr float LOWEST = -1e30f;

enum Kind { EMBED, QKV, ATTEND, COMBINE, OUT, GATE_UP, DOWN, HEAD };

struct Record {  // of a task; records.py writes it
  int kind, first, last, inputs;  // of a product: outputs and inputs. Else first is the row and last the head
  int split, wait, least, signal;  // wait: a counter, or -1
  const bf16 *weight, *second;     // second: of the other half of a gated pair
  const bf16 *norm, *bias;         // or null
  const bf16 *x;                   // null: of splits of attention
  bf16 *y;
  bf16 *keys, *values;             // of the layer's cache
  const bf16 *q_norm, *k_norm;     // or null
};

struct Step {
  const Record *records;
  const int *starts;  // by block, its first record; and one more
  unsigned *counters;  // and behind the last one that of blocks that have ended
  const int *tokens, *positions, *table;  // position -1: a row without a request
  const float *cos_sin;
  float *partial;
  const bf16 *embedding;
  long long *trace;  // null, or four numbers a record: cycles of its begin, of the end of its wait, of its end; and how
                     // many of them thread 0 waited for weights
  long long block_step;  // numbers from block to block of the cache
  int counter_count, blocks, columns, heads, kv_heads, width, panel, records_room;
  float eps, head_eps, scale;
};

struct Shared {  // offsets into dynamic shared memory
  Mbarrier *full, *empty;
  Record *records;
  float *sums;   // [2][WARPS][8][TILE]
  bf16 *panel;   // activations, or what attention needs
  unsigned char *ring;
};

struct Ring {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

struct Eight { bf16 at[8]; };

__device__ __forceinline__ Eight eight_of(uint4 words) {
  Eight e;
  memcpy(&e, &words, 16);
  return e;
}
__device__ __forceinline__ Eight fresh(const bf16 *from) { return eight_of(load_fresh(from)); }
__device__ __forceinline__ float rounded(float x) { return to_float(__float2bfloat16(x)); }
__device__ __forceinline__ float fresh_one(const bf16 *from) {
#ifdef __CUDACC__
  unsigned short bits = __ldcg(reinterpret_cast<const unsigned short *>(from));
  return to_float(__ushort_as_bfloat16(bits));
#else
  return to_float(*from);
#endif
}
__device__ __forceinline__ float fresh_float(const float *from) {
#ifdef __CUDACC__
  return __ldcg(from);
#else
  return *from;
#endif
}
__device__ __forceinline__ long long now(const Step &step) { return step.trace ? cycles() : 0; }
__device__ __forceinline__ void workers_meet() { named_barrier(1, WORKERS); }

__device__ __forceinline__ bool is_product(int kind) { return kind == QKV || kind >= OUT; }

// ---- The ninth warp -------------------------------------------------------------------------------------------------

__device__ void stream(const Shared &shared, int count) {
  const int lane = threadIdx.x % 32;
  Ring ring;
  for (int i = 0; i < count; ++i) {
    const Record &task = shared.records[i];
    if (!is_product(task.kind)) continue;
    const bool pair = task.kind == GATE_UP;
    const int each = pair ? TILE / 2 : TILE, slot = pair ? lane % 4 : lane;
    for (int first = task.first; first < task.last; first += each) {
      const int outputs = min(each, task.last - first), rows = pair ? 2 * outputs : outputs;
      const bool loads = lane < TILE && slot < outputs;
      const bf16 *row = (pair && lane >= 4 ? task.second : task.weight) + (long long)(first + slot) * task.inputs;
      for (int k = 0; k < task.inputs; k += DEPTH) {
        const int bytes = min(DEPTH, task.inputs - k) * 2;
        mbarrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
        if (lane == 0) mbarrier_expect(&shared.full[ring.stage], rows * bytes);
        __syncwarp();
        if (loads)
          bulk_load(shared.ring + ring.stage * STAGE_BYTES + lane * PITCH * 2, row + k, bytes, &shared.full[ring.stage]);
        ring.next();
      }
    }
  }
}

// ---- Products -------------------------------------------------------------------------------------------------------

constexpr int PART = DIM + 2;  // of a partial result of attention: sums, the largest score, the sum of weights

// A number of a head's result, made of those of its splits.
__device__ __forceinline__ bf16 joined(const float *partial, long long head, int d) {
  const float *parts = partial + head * SPLITS * PART;
  float top = LOWEST, sum = 0, weights = 0;
#pragma unroll
  for (int s = 0; s < SPLITS; ++s) top = max(top, fresh_float(parts + s * PART + DIM));
#pragma unroll
  for (int s = 0; s < SPLITS; ++s) {
    const float weight = expf(fresh_float(parts + s * PART + DIM) - top);
    sum += fresh_float(parts + s * PART + d) * weight;
    weights += fresh_float(parts + s * PART + DIM + 1) * weight;
  }
  return __float2bfloat16(weights > 0 ? sum / weights : 0.f);
}

// Copy the rows of x to the panel, normalised if there is a norm. A warp has a row.
__device__ void fill_panel(const Step &step, const Shared &shared, const Record &task) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, inputs = task.inputs, pitch = inputs + 8;
  if (!task.x) {
    for (int i = threadIdx.x; i < ROWS * inputs; i += WORKERS) {
      const int row = i / inputs, k = i % inputs;
      shared.panel[row * pitch + k] = joined(step.partial, (long long)row * step.heads + k / DIM, k % DIM);
    }
    return;
  }
  if (!task.norm) {
    const int vectors = inputs / 8;
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * vectors; i += WORKERS) {
      const int row = i / vectors, k = i % vectors * 8;
      *reinterpret_cast<uint4 *>(shared.panel + row * pitch + k) = load_fresh(task.x + (long long)row * inputs + k);
    }
    return;
  }
  for (int row = warp; row < ROWS; row += WARPS) {
    bf16 *to = shared.panel + row * pitch;
    float squares = 0;
#pragma unroll 8
    for (int k = lane * 8; k < inputs; k += 256) {
      const Eight x = fresh(task.x + (long long)row * inputs + k);
#pragma unroll
      for (int j = 0; j < 8; ++j) squares += to_float(x.at[j]) * to_float(x.at[j]);
      *reinterpret_cast<Eight *>(to + k) = x;
    }
    for (int mask = 16; mask; mask /= 2) squares += __shfl_xor_sync(~0u, squares, mask);
    const float scale = 1.f / sqrtf(squares / inputs + step.eps);
    for (int k = lane * 8; k < inputs; k += 256) {
      Eight x = *reinterpret_cast<Eight *>(to + k);
      const Eight weight = *reinterpret_cast<const Eight *>(task.norm + k);
#pragma unroll
      for (int j = 0; j < 8; ++j) x.at[j] = __float2bfloat16(to_float(x.at[j]) * scale * to_float(weight.at[j]));
      *reinterpret_cast<Eight *>(to + k) = x;
    }
  }
}

// Add up the warps' sums of a tile, and write its outputs.
__device__ __forceinline__ void finish_tile(const Step &step, const Record &task, const float *sums, int first) {
  const int row = threadIdx.x / TILE, n = threadIdx.x % TILE;
  const bool pair = task.kind == GATE_UP;
  const int output = first + n;
  if (threadIdx.x >= 8 * TILE || row >= ROWS || output >= task.last || (pair && n >= TILE / 2)) return;
  float sum = 0, up = 0;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) {
    sum += sums[(warp * 8 + row) * TILE + n];
    if (pair) up += sums[(warp * 8 + row) * TILE + n + TILE / 2];
  }
  if (pair) {
    const int inner = int((task.second - task.weight) / task.inputs);
    task.y[(long long)row * inner + output] = __float2bfloat16(sum / (1.f + expf(-sum)) * up);
    return;
  }
  if (task.kind == OUT || task.kind == DOWN) {
    bf16 *to = task.y + (long long)row * step.width + output;
    *to = __float2bfloat16(fresh_one(to) + rounded(sum));
    return;
  }
  if (task.bias) sum += to_float(task.bias[output]);
  task.y[(long long)row * task.split + output] = __float2bfloat16(sum);  // split: here the width of y
}

__device__ long long multiply(const Step &step, const Shared &shared, const Record &task, Ring &ring) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, inputs = task.inputs;
  const int each = task.kind == GATE_UP ? TILE / 2 : TILE;
  fill_panel(step, shared, task);
  workers_meet();
  const bool live = lane / 4 < ROWS;
  const bf16 *x = shared.panel + (live ? lane / 4 : 0) * (inputs + 8) + lane % 4 * 2;
  const int at = lane % 8 * PITCH + lane / 8 * 8;  // of the row and the eight numbers that ldmatrix reads for this lane
  long long waited = 0;
  int odd = 0;
  for (int first = task.first; first < task.last; first += each, odd ^= 1) {
    float even_sums[4] = {}, odd_sums[4] = {};
    for (int start = 0; start < inputs; start += DEPTH) {
      const int depth = min(DEPTH, inputs - start);
      waited -= now(step);
      mbarrier_wait(&shared.full[ring.stage], ring.parity);
      waited += now(step);
      const bf16 *weights = reinterpret_cast<const bf16 *>(shared.ring + ring.stage * STAGE_BYTES) + at;
#pragma unroll 4
      for (int k = warp * 32; k < depth; k += WARPS * 32) {
        unsigned w[4], a[4] = {}, b[4] = {};
        ldmatrix_x4(w, weights + k);
        if (live) {
          const unsigned *from = reinterpret_cast<const unsigned *>(x + start + k);
          a[0] = from[0], a[2] = from[4], b[0] = from[8], b[2] = from[12];
        }
        mma_m16n8k16(even_sums, a, w);
        mma_m16n8k16(odd_sums, b, w + 2);
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&shared.empty[ring.stage]);
      ring.next();
    }
    float *sums = shared.sums + odd * WARPS * 8 * TILE;
    float *own = sums + (warp * 8 + lane / 4) * TILE + lane % 4 * 2;
    own[0] = even_sums[0] + odd_sums[0], own[1] = even_sums[1] + odd_sums[1];
    workers_meet();
    finish_tile(step, task, sums, first);
  }
  return waited;
}

// ---- Attention ------------------------------------------------------------------------------------------------------

constexpr int LANES = DIM / 8;          // that share a token
constexpr int AT_ONCE = 32 / LANES;     // tokens of a warp at once
constexpr int GROUPS = WARPS * AT_ONCE;  // tokens of a block at once
constexpr int AHEAD = 4;                // tokens of a lane group that are on their way together

// Normalise and rotate a head into `to`, rounded as the engine rounds it. A warp does it.
__device__ void prepare_head(const Step &step, const bf16 *from, const bf16 *norm, int position, float *to) {
  const int lane = threadIdx.x % 32;
  float squares = 0;
  for (int i = lane; i < DIM; i += 32) {
    const float x = fresh_one(from + i);
    squares += x * x;
    to[i] = x;
  }
  if (norm) {
    for (int mask = 16; mask; mask /= 2) squares += __shfl_xor_sync(~0u, squares, mask);
    const float scale = 1.f / sqrtf(squares / DIM + step.head_eps);
    for (int i = lane; i < DIM; i += 32) to[i] = rounded(to[i] * scale * to_float(norm[i]));
  }
  __syncwarp();
  const float *angles = step.cos_sin + (long long)position * ROTATED;
  for (int i = lane; i < ROTATED / 2; i += 32) {
    const float a = to[i], b = to[i + ROTATED / 2], cosine = angles[i], sine = angles[i + ROTATED / 2];
    to[i] = rounded(a * cosine - b * sine);
    to[i + ROTATED / 2] = rounded(b * cosine + a * sine);
  }
}

struct Tokens { int start, stop; };

// The tokens of a row that a task attends to: none of a row without a request.
__device__ __forceinline__ Tokens tokens_of(const Record &task, int position) {
  const int pages = (position + PAGE) / PAGE, own = (pages + SPLITS - 1) / SPLITS;
  return {task.split * own * PAGE, min(position + 1, (task.split + 1) * own * PAGE)};
}

__device__ void attend(const Step &step, const Shared &shared, const Record &task) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = task.first, head = task.last;
  const int position = step.positions[row];
  float *q = reinterpret_cast<float *>(shared.panel), *key = q + GROUP * DIM, *parts = key + DIM;
  const auto [start, stop] = tokens_of(task, position);
  const int *table = step.table + (long long)row * step.columns;
  const bf16 *projected = task.x + (long long)row * (step.heads + 2 * step.kv_heads) * DIM;
  const long long heads_step = PAGE * DIM;
  if (start < stop) {
    for (int i = warp; i < GROUP; i += WARPS)
      prepare_head(step, projected + (head * GROUP + i) * DIM, task.q_norm, position, q + i * DIM);
    if (stop == position + 1 && warp == WARPS - 1) {  // the new key and value
      const long long place = table[position / PAGE] * step.block_step + head * heads_step + position % PAGE * DIM;
      prepare_head(step, projected + (step.heads + head) * DIM, task.k_norm, position, key);
      __syncwarp();
      for (int i = lane; i < DIM; i += 32) {
        task.keys[place + i] = __float2bfloat16(key[i]);
        round_to(task.values[place + i], fresh_one(projected + (step.heads + step.kv_heads + head) * DIM + i));
      }
    }
  }
  workers_meet();
  float sums[GROUP][8] = {}, largest[GROUP], total[GROUP] = {}, queries[GROUP][8];
  const int column = lane % LANES * 8;
  for (int i = 0; i < GROUP; ++i) {
    largest[i] = LOWEST;
    for (int j = 0; j < 8; ++j) queries[i][j] = start < stop ? q[i * DIM + column + j] * step.scale : 0.f;
  }
  for (int base = start; base < stop; base += GROUPS * AHEAD) {
    Eight keys[AHEAD], values[AHEAD];
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      const int token = min(base + u * GROUPS + warp * AT_ONCE + lane / LANES, stop - 1);
      const long long place = table[token / PAGE] * step.block_step + head * heads_step + token % PAGE * DIM + column;
      keys[u] = fresh(task.keys + place);
      values[u] = fresh(task.values + place);
    }
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      const bool seen = base + u * GROUPS + warp * AT_ONCE + lane / LANES < stop;
#pragma unroll
      for (int i = 0; i < GROUP; ++i) {
        float score = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) score += queries[i][j] * to_float(keys[u].at[j]);
        for (int mask = LANES / 2; mask; mask /= 2) score += __shfl_xor_sync(~0u, score, mask);
        const float top = seen ? max(largest[i], score) : largest[i];
        const float kept = expf(largest[i] - top), weight = seen ? expf(score - top) : 0.f;
        largest[i] = top;
        total[i] = total[i] * kept + weight;
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i][j] = sums[i][j] * kept + weight * to_float(values[u].at[j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    for (int mask = LANES; mask < 32; mask *= 2) {
      const float other = __shfl_xor_sync(~0u, largest[i], mask), top = max(largest[i], other);
      const float mine = expf(largest[i] - top), theirs = expf(other - top);
      total[i] = total[i] * mine + __shfl_xor_sync(~0u, total[i], mask) * theirs;
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[i][j] = sums[i][j] * mine + __shfl_xor_sync(~0u, sums[i][j], mask) * theirs;
      largest[i] = top;
    }
    float *part = parts + (warp * GROUP + i) * PART;
    if (lane < LANES)
      for (int j = 0; j < 8; ++j) part[column + j] = sums[i][j];
    if (lane == 0) part[DIM] = largest[i], part[DIM + 1] = total[i];
  }
  workers_meet();
  for (int at = threadIdx.x; at < GROUP * DIM; at += WORKERS) {
    const int i = at / DIM, d = at % DIM;
    float top = LOWEST, sum = 0, weights = 0;
    for (int w = 0; w < WARPS; ++w) top = max(top, parts[(w * GROUP + i) * PART + DIM]);
    for (int w = 0; w < WARPS; ++w) {
      const float *part = parts + (w * GROUP + i) * PART, weight = expf(part[DIM] - top);
      sum += part[d] * weight, weights += part[DIM + 1] * weight;
    }
    const long long place = (long long)row * step.heads + head * GROUP + i;
    if (SPLITS == 1) {
      task.y[place * DIM + d] = __float2bfloat16(weights > 0 ? sum / weights : 0.f);
    } else {
      float *to = step.partial + (place * SPLITS + task.split) * PART;
      to[d] = sum;
      if (d == 0) to[DIM] = top, to[DIM + 1] = weights;
    }
  }
}

__device__ void combine(const Step &step, const Record &task) {
  for (int at = threadIdx.x; at < GROUP * DIM; at += WORKERS) {
    const long long head = (long long)task.first * step.heads + task.last * GROUP + at / DIM;
    task.y[head * DIM + at % DIM] = joined(step.partial, head, at % DIM);
  }
}

__device__ void embed(const Step &step, const Record &task) {
  const bf16 *from = step.embedding + (long long)step.tokens[task.first] * step.width;
  for (int i = threadIdx.x * 8; i < step.width; i += WORKERS * 8)
    *reinterpret_cast<uint4 *>(task.y + (long long)task.first * step.width + i) =
        *reinterpret_cast<const uint4 *>(from + i);
}

// ---- The list -------------------------------------------------------------------------------------------------------

// Ask for what a task reads that no task writes, while it waits: weights of norms, and keys and values of earlier steps.
__device__ void expect_reads(const Step &step, const Record &task) {
  if (is_product(task.kind) && task.norm)
    for (int i = threadIdx.x * 64; i < task.inputs; i += WORKERS * 64) prefetch_line(task.norm + i);
  if (task.kind != ATTEND) return;
  const int position = step.positions[task.first];
  const auto [start, stop] = tokens_of(task, position);
  if (threadIdx.x == 0 && ROTATED && position >= 0) prefetch_line(step.cos_sin + (long long)position * ROTATED);
  for (int token = start + int(threadIdx.x); token < stop; token += WORKERS) {
    const long long place = step.table[(long long)task.first * step.columns + token / PAGE] * step.block_step +
                            (long long)(task.last * PAGE + token % PAGE) * DIM;
    for (int i = 0; i < DIM; i += 64) prefetch_line(task.keys + place + i), prefetch_line(task.values + place + i);
  }
}

__device__ void work(const Step &step, const Shared &shared, int count) {
  Ring ring;
  for (int i = 0; i < count; ++i) {
    const Record &task = shared.records[i];
    const long long began = now(step);
    long long waited = 0;
    expect_reads(step, task);
    if (task.wait >= 0 && threadIdx.x == 0) wait_for_counter(step.counters + task.wait, task.least);
    workers_meet();
    const long long ready = now(step);
    if (is_product(task.kind)) waited = multiply(step, shared, task, ring);
    else if (task.kind == ATTEND) attend(step, shared, task);
    else if (task.kind == COMBINE) combine(step, task);
    else embed(step, task);
    workers_meet();
    if (task.signal >= 0 && threadIdx.x == 0) signal_counter(step.counters + task.signal);
    if (step.trace && threadIdx.x == 0) {
      long long *to = step.trace + 4ll * (step.starts[blockIdx.x] + i);
      to[0] = began, to[1] = ready, to[2] = now(step), to[3] = waited;
    }
  }
  if (threadIdx.x == 0) {  // the last block to end makes the counters ready for the next launch
    unsigned *ended = step.counters + step.counter_count;
    if (add_to_counter(ended) + 1 == unsigned(step.blocks))
      for (int i = 0; i <= step.counter_count; ++i) step.counters[i] = 0;
  }
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32, 1) persistent(const __grid_constant__ Step step) {
  unsigned char *memory = dynamic_shared();
  Shared shared;
  shared.ring = memory;
  shared.full = reinterpret_cast<Mbarrier *>(memory + STAGES * STAGE_BYTES);
  shared.empty = shared.full + STAGES;
  shared.sums = reinterpret_cast<float *>(shared.empty + STAGES);
  shared.panel = reinterpret_cast<bf16 *>(shared.sums + 2 * WARPS * 8 * TILE);
  shared.records = reinterpret_cast<Record *>(reinterpret_cast<unsigned char *>(shared.panel) + step.panel);
  const int first = step.starts[blockIdx.x], count = step.starts[blockIdx.x + 1] - first;
  const uint4 *from = reinterpret_cast<const uint4 *>(step.records + first);
  for (int i = threadIdx.x; i < count * int(sizeof(Record) / 16); i += WORKERS + 32)
    reinterpret_cast<uint4 *>(shared.records)[i] = from[i];
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) mbarrier_init(&shared.full[i], 1), mbarrier_init(&shared.empty[i], WARPS);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < WORKERS) work(step, shared, count);
  else stream(shared, count);
}
