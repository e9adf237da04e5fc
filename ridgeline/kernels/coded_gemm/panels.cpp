// Linear maps on a CPU of weights in codes of 2 to 8 bits, with activations rounded to int8. panels.py lays weights out.
//
// Sixteen outputs are computed together, one in each lane. Their weights are a panel, which is read from end to end:
// for each run of 32 inputs eight vectors of 64 bytes, of which vector v has four inputs (4v to 4v + 3) of each output.
// One instruction adds four products of bytes to each lane. The codes of narrow planes lie beside each other in a byte:
// a plane of W bits has W vectors for a run, and vector v's codes are those of vector v % W, W * (v / W) bits up.
//
// The sums of a run are whole numbers; each is multiplied by the run's step of the activations, and by the scale of its
// group of weights. What is subtracted from codes (a middle, or a minimum) is multiplied with the sum of the inputs.
//
// The file is compiled for the machine that it runs on, which has AVX2 at least.

#include <immintrin.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

namespace {

constexpr int LANES = 16, RUN = 32, VECTORS = 8, BYTES = 64;

typedef uint8_t Bytes __attribute__((vector_size(64)));
typedef uint16_t Pairs __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));
typedef int8_t Levels __attribute__((vector_size(16)));
typedef uint16_t Halves __attribute__((vector_size(32)));

enum Type { FLOAT32, BFLOAT16, FLOAT16 };

extern "C" struct Weight {
  const uint8_t *code;         // [panels, runs, vectors of the planes, 64]
  const void *scale, *minimum; // [panels, groups, 16]: float16, or int8 beneath outer scales; no minimum: null
  const uint16_t *outer, *outer_minimum;  // float16 [panels, supers, 16], or null
  const float *factor;         // [panels * 16], of the outputs
  const uint8_t *table;        // the level of each code, or null
  int64_t inputs, outputs, runs, bits, group, super, middle;
  int64_t by_token;            // 1: activations have a step for each token, otherwise for each run
};

extern "C" struct Call {
  const void *x, *residual, *norm, *bias;
  void *sum, *y;
  int64_t tokens, type, norm_type, threads;
  double eps;
  void (*parallel)(void (*)(void *), void *, unsigned, unsigned);  // OpenMP's, or null
};

// Activations after rounding: x = level * step. The sums of levels are of 16 inputs each.
struct Rounded {
  int8_t *level;  // [tokens, runs, 32]
  float *step;    // [tokens, runs]
  int32_t *sum;   // [tokens, runs, 2]
};

template <class V> INLINE V load(const void *from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}

template <class V> INLINE void store(void *to, V v) { memcpy(to, &v, sizeof v); }

INLINE Floats all(float x) { return x - Floats{}; }
INLINE Ints all(int32_t x) { return x - Ints{}; }

// ---- What differs between instruction sets

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

INLINE Ints dot(Ints sum, Bytes code, int32_t four) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)code, _mm512_set1_epi32(four));
}
INLINE Bytes look_up(Bytes table, Bytes code) { return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)code); }
INLINE Floats widen(Halves x) { return (Floats)_mm512_cvtph_ps((__m256i)x); }
INLINE Halves narrow(Floats x) { return (Halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT); }

#else

struct Two { __m256i low, high; };
INLINE Two halved(const void *from) {
  return {_mm256_loadu_si256((const __m256i *)from), _mm256_loadu_si256((const __m256i *)from + 1)};
}
template <class V> INLINE V joined(__m256i low, __m256i high) {
  Two both = {low, high};
  return load<V>(&both);
}
INLINE __m256i dot(__m256i sum, __m256i code, __m256i four) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(sum, code, four);
#else  // Products are added in pairs of 16 bits, which hold twice 127 * 128: so codes are halved first.
  const __m256i ones = _mm256_set1_epi16(1), half = _mm256_and_si256(_mm256_srli_epi16(code, 1), _mm256_set1_epi8(127));
  const __m256i rest = _mm256_sub_epi8(code, half);
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(half, four), ones));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(rest, four), ones));
#endif
}
INLINE Ints dot(Ints sum, Bytes code, int32_t four) {
  const Two s = halved(&sum), c = halved(&code);
  const __m256i x = _mm256_set1_epi32(four);
  return joined<Ints>(dot(s.low, c.low, x), dot(s.high, c.high, x));
}
INLINE Bytes look_up(Bytes table, Bytes code) {
  const Two t = halved(&table), c = halved(&code);
  return joined<Bytes>(_mm256_shuffle_epi8(t.low, c.low), _mm256_shuffle_epi8(t.high, c.high));
}
INLINE Floats widen(Halves x) {
  const __m256i all = (__m256i)x;
  return joined<Floats>((__m256i)_mm256_cvtph_ps(_mm256_castsi256_si128(all)),
                        (__m256i)_mm256_cvtph_ps(_mm256_extracti128_si256(all, 1)));
}
INLINE Halves narrow(Floats x) {
  const Two both = halved(&x);
  const __m128i low = _mm256_cvtps_ph((__m256)both.low, _MM_FROUND_TO_NEAREST_INT);
  return (Halves)_mm256_set_m128i(_mm256_cvtps_ph((__m256)both.high, _MM_FROUND_TO_NEAREST_INT), low);
}

#endif

// ---- Numbers of 16 and 32 bits

INLINE Floats from_bfloat16(Halves x) { return (Floats)(__builtin_convertvector(x, Words) << 16); }

INLINE Halves to_bfloat16(Floats x) {
  const Words bits = (Words)x, rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const Words kept = (x == x) ? rounded : (bits | 0x400000);  // NaN stays NaN
  return __builtin_convertvector(kept >> 16, Halves);
}

// Sixteen numbers from place `at` on, of which `count` are there; the others are 0.
INLINE Floats read(const void *x, int64_t type, int64_t at, int64_t count = LANES) {
  const int64_t size = type == FLOAT32 ? 4 : 2;
  const char *from = (const char *)x + at * size;
  char piece[BYTES] = {};
  if (count < LANES) from = (const char *)memcpy(piece, from, count * size);
  if (type == FLOAT32) return load<Floats>(from);
  return type == BFLOAT16 ? from_bfloat16(load<Halves>(from)) : widen(load<Halves>(from));
}

INLINE void write(void *y, int64_t type, int64_t at, Floats value, int64_t count = LANES) {
  const int64_t size = type == FLOAT32 ? 4 : 2;
  char piece[BYTES];
  if (type == FLOAT32) store(piece, value);
  else store(piece, type == BFLOAT16 ? to_bfloat16(value) : narrow(value));
  if (count < LANES) memcpy((char *)y + at * size, piece, count * size);
  else if (type == FLOAT32) store((char *)y + at * 4, value);
  else store((char *)y + at * 2, load<Halves>(piece));
}

INLINE float total(Floats x) {
  float sum = 0;
  for (int i = 0; i < LANES; ++i) sum += x[i];
  return sum;
}

INLINE float largest(Ints magnitude) {  // of bits of floats without their sign, where NaN is above infinity
  int32_t most = 0;
  for (int i = 0; i < LANES; ++i) most = magnitude[i] > most ? magnitude[i] : most;
  float value;
  memcpy(&value, &most, sizeof value);
  return value;
}

INLINE Ints magnitudes(Floats x) { return (Ints)x & 0x7fffffff; }

// ---- Activations

// Round 32 numbers. Halves are rounded up, around 128, as the op w8a8_linear says.
INLINE void round_run(const float *x, float step, int8_t *level, int32_t *sum) {
  for (int half = 0; half < 2; ++half) {
    const Floats value = load<Floats>(x + half * LANES);
    Ints whole = __builtin_convertvector(value / step + 128.5f, Ints) - 128;
    whole = step == 0 ? Ints{} : whole;
    store(level + half * LANES, __builtin_convertvector(whole, Levels));
    int32_t add = 0;
    for (int i = 0; i < LANES; ++i) add += whole[i];
    sum[half] = add;
  }
}

// Write a token's numbers to `row`, filled up with zeros: with the residual added and normalised if that is asked for.
void gather(const Weight &w, const Call &c, int64_t token, float *row) {
  const int64_t inputs = w.inputs, first = token * inputs;
  Floats squares = {};
  for (int64_t i = 0; i < w.runs * RUN; i += LANES) {
    const int64_t count = inputs - i < LANES ? (inputs > i ? inputs - i : 0) : LANES;
    Floats x = read(c.x, c.type, first + i, count);
    if (c.residual) {
      x = x + read(c.residual, c.type, first + i, count);
      write(c.sum, c.type, first + i, x, count);
      if (c.type != FLOAT32) x = c.type == BFLOAT16 ? from_bfloat16(to_bfloat16(x)) : widen(narrow(x));
    }
    squares += x * x;
    store(row + i, x);
  }
  if (!c.norm) return;
  const float scale = 1 / __builtin_sqrtf(total(squares) / inputs + (float)c.eps);
  for (int64_t i = 0; i < w.runs * RUN; i += LANES) {
    const int64_t count = inputs - i < LANES ? (inputs > i ? inputs - i : 0) : LANES;
    store(row + i, load<Floats>(row + i) * scale * read(c.norm, c.norm_type, i, count));
  }
}

void round_token(const Weight &w, const Call &c, int64_t token, float *row, const Rounded &to) {
  gather(w, c, token, row);
  Ints most = {};
  for (int64_t k = 0; w.by_token && k < w.runs * 2; ++k) {
    const Ints here = magnitudes(load<Floats>(row + k * LANES));
    most = here > most ? here : most;
  }
  for (int64_t k = 0; k < w.runs; ++k) {
    const Ints low = magnitudes(load<Floats>(row + k * RUN)), high = magnitudes(load<Floats>(row + k * RUN + LANES));
    const float step = largest(w.by_token ? most : low > high ? low : high) / 127;
    const int64_t run = token * w.runs + k;
    to.step[run] = step;
    round_run(row + k * RUN, step, to.level + run * RUN, to.sum + run * 2);
  }
}

// ---- Weights

template <int WIDTH> INLINE Bytes plane(const uint8_t *code, int v) {
  const Pairs bits = load<Pairs>(code + BYTES * (v % WIDTH)) >> (WIDTH * (v / WIDTH));
  return (Bytes)bits & (uint8_t)((1 << WIDTH) - 1);
}

template <int BITS> INLINE Bytes codes(const uint8_t *code, int v) {
  constexpr int LOW = BITS >= 8 ? 8 : BITS >= 4 ? 4 : 2, HIGH = BITS - LOW;
  const Bytes low = plane<LOW>(code, v);
  if constexpr (HIGH == 0) return low;
  else return low | (Bytes)((Pairs)plane<HIGH>(code + BYTES * LOW, v) << LOW);
}

// The scales or minima of a group.
INLINE Floats scales(const void *values, const uint16_t *outer, int64_t group, int64_t run_of_outer) {
  if (!outer) return widen(load<Halves>((const uint16_t *)values + group * LANES));
  const Levels level = load<Levels>((const int8_t *)values + group * LANES);
  return __builtin_convertvector(__builtin_convertvector(level, Ints), Floats) *
         widen(load<Halves>(outer + run_of_outer * LANES));
}

// Sixteen outputs of T tokens from `token` on. HALVES: a group has 16 inputs, so a run has two; otherwise whole runs.
template <int BITS, bool HALVES, int T>
void tile(const Weight &w, const Call &c, const Rounded &x, int64_t panel, int64_t token) {
  constexpr int PARTS = HALVES ? 2 : 1;
  const int64_t each = HALVES ? 1 : w.group / RUN, groups = (w.runs + each - 1) / each * PARTS;
  const int64_t supers = w.super ? (w.runs * RUN + w.super - 1) / w.super : 0;
  const uint8_t *code = w.code + panel * w.runs * BITS * BYTES;
  const Bytes table = w.table ? load<Bytes>(w.table) : Bytes{};
  const int32_t middle = (int32_t)w.middle;
  Floats sum[T] = {};
  for (int64_t first = 0, group = panel * groups; first < w.runs; first += each) {
    const int64_t last = first + each < w.runs ? first + each : w.runs;
    const int64_t super = w.super ? panel * supers + first * RUN / w.super : 0;
    Floats part[PARTS][T] = {};
    float low[PARTS][T] = {};
    for (int64_t k = first; k < last; ++k, code += BITS * BYTES) {
      Bytes level[VECTORS];
      UNROLL for (int v = 0; v < VECTORS; ++v) {
        level[v] = codes<BITS>(code, v);
        if (BITS == 4 && w.table) level[v] = look_up(table, level[v]);
      }
      UNROLL for (int t = 0; t < T; ++t) {
        const int64_t run = (token + t) * w.runs + k;
        const int32_t *sums = x.sum + run * 2;
        const int8_t *four = x.level + run * RUN;
        UNROLL for (int p = 0; p < PARTS; ++p) {
          const int32_t inputs = HALVES ? sums[p] : sums[0] + sums[1];
          Ints whole = all(-middle * inputs);
          UNROLL for (int v = p * 4; v < (HALVES ? p * 4 + 4 : VECTORS); ++v)
            whole = dot(whole, level[v], load<int32_t>(four + 4 * v));
          part[p][t] += __builtin_convertvector(whole, Floats) * x.step[run];
          if (w.minimum) low[p][t] += (float)inputs * x.step[run];
        }
      }
    }
    UNROLL for (int p = 0; p < PARTS; ++p, ++group) {
      const Floats scale = scales(w.scale, w.outer, group, super);
      UNROLL for (int t = 0; t < T; ++t) sum[t] += part[p][t] * scale;
      if (!w.minimum) continue;
      const Floats minimum = scales(w.minimum, w.outer_minimum, group, super);
      UNROLL for (int t = 0; t < T; ++t) sum[t] -= minimum * low[p][t];
    }
  }
  const int64_t at = panel * LANES, count = w.outputs - at < LANES ? w.outputs - at : LANES;
  for (int t = 0; t < T; ++t) {
    Floats y = sum[t] * load<Floats>(w.factor + at);
    if (c.bias) y += read(c.bias, c.type, at, count);
    write(c.y, c.type, (token + t) * w.outputs + at, y, count);
  }
}

template <int BITS, bool HALVES> void panel_products(const Weight &w, const Call &c, const Rounded &x, int64_t panel) {
  int64_t token = 0;
  for (; token + 8 <= c.tokens; token += 8) tile<BITS, HALVES, 8>(w, c, x, panel, token);
  if (c.tokens - token >= 4) tile<BITS, HALVES, 4>(w, c, x, panel, token), token += 4;
  if (c.tokens - token >= 2) tile<BITS, HALVES, 2>(w, c, x, panel, token), token += 2;
  if (c.tokens - token >= 1) tile<BITS, HALVES, 1>(w, c, x, panel, token);
}

template <int BITS> void panel_of(const Weight &w, const Call &c, const Rounded &x, int64_t panel) {
  w.group == 16 ? panel_products<BITS, true>(w, c, x, panel) : panel_products<BITS, false>(w, c, x, panel);
}

void one_panel(const Weight &w, const Call &c, const Rounded &x, int64_t panel) {
  switch (w.bits) {
    case 2: return panel_of<2>(w, c, x, panel);
    case 3: return panel_of<3>(w, c, x, panel);
    case 4: return panel_of<4>(w, c, x, panel);
    case 5: return panel_of<5>(w, c, x, panel);
    case 6: return panel_of<6>(w, c, x, panel);
    default: return panel_of<8>(w, c, x, panel);
  }
}

// ---- Threads

// Run `body` for each number below `count`, some at a time for each thread.
template <class Body> void for_each(const Call &c, int64_t count, Body body) {
  struct Work {
    Body &body;
    int64_t count, some;
    std::atomic<int64_t> next;
    static void run(void *data) {
      Work &work = *(Work *)data;
      for (int64_t first; (first = work.next.fetch_add(work.some)) < work.count;)
        for (int64_t i = first; i < first + work.some && i < work.count; ++i) work.body(i);
    }
  };
  const int64_t pieces = 8 * c.threads;  // so many that a thread that is held up leaves its share to the others
  Work work{body, count, (count + pieces - 1) / pieces, {0}};
  if (c.threads > 1 && count > 1 && c.parallel) c.parallel(Work::run, &work, (unsigned)c.threads, 0);
  else Work::run(&work);
}

}  // namespace

// Compute y = x · weightᵀ + bias, behind a norm if there is one. Return 0, or 1 if there is no memory.
extern "C" int multiply(const Weight *weight, const Call *call) {
  const Weight &w = *weight;
  const Call &c = *call;
  const int64_t runs = c.tokens * w.runs, rows = c.threads > 1 ? c.tokens : 1;
  const int64_t sizes[] = {runs * RUN, runs * 4, runs * 8, rows * w.runs * RUN * 4};
  char *memory = (char *)malloc(sizes[0] + sizes[1] + sizes[2] + sizes[3]);
  if (!memory) return 1;
  const Rounded x = {(int8_t *)memory, (float *)(memory + sizes[0]), (int32_t *)(memory + sizes[0] + sizes[1])};
  float *row = (float *)(memory + sizes[0] + sizes[1] + sizes[2]);
  for_each(c, c.tokens, [&](int64_t t) { round_token(w, c, t, row + (rows > 1 ? t * w.runs * RUN : 0), x); });
  for_each(c, (w.outputs + LANES - 1) / LANES, [&](int64_t panel) { one_panel(w, c, x, panel); });
  free(memory);
  return 0;
}
