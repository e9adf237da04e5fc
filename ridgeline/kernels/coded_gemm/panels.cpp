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
#include <type_traits>

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

namespace {

constexpr int LANES = 16, RUN = 32, VECTORS = 8, BYTES = 64;
constexpr int SUPER = 8;  // runs that share an outer scale

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
  int64_t inputs, outputs, runs, bits, group, middle;
  int64_t by_token;            // 1: activations have a step for each token, otherwise for each run
};

extern "C" struct Call {
  const void *x, *residual, *norm, *bias;
  void *sum, *y;
  int64_t tokens, type, norm_type, threads;
  int64_t tiles;  // 1: the process may use tiles
  double eps;
  void (*parallel)(void (*)(void *), void *, unsigned, unsigned);  // OpenMP's, or null
};

// Activations after rounding: x = level * step. A run has one sum, or two where groups have 16 inputs.
struct Rounded {
  int8_t *level;   // [tokens, runs, 32]
  float *step;     // [tokens, runs]
  float *sum;      // [tokens, runs, 2], of x
  int32_t *start;  // [tokens, runs, 2]: what sums of products begin with, so that `middle` is subtracted from codes
};

template <class V> INLINE V load(const void *from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}

template <class V> INLINE void store(void *to, V v) { memcpy(to, &v, sizeof v); }

INLINE Ints all(int32_t x) { return x - Ints{}; }

// ---- What differs between instruction sets

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

INLINE Ints dot(Ints sum, Bytes code, int32_t four) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)code, _mm512_set1_epi32(four));
}
INLINE Bytes look_up(Bytes table, Bytes code) { return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)code); }
INLINE Floats widen(Halves x) { return (Floats)_mm512_cvtph_ps((__m256i)x); }
INLINE Halves narrow(Floats x) { return (Halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT); }
INLINE Ints widen(Levels x) { return (Ints)_mm512_cvtepi8_epi32((__m128i)x); }
INLINE Levels narrow(Ints x) { return (Levels)_mm512_cvtepi32_epi8((__m512i)x); }
INLINE Words upper(Halves x) { return (Words)_mm512_cvtepu16_epi32((__m256i)x) << 16; }
INLINE Halves upper(Words x) { return (Halves)_mm512_cvtepi32_epi16((__m512i)(x >> 16)); }
INLINE float total(Floats x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE int32_t total(Ints x) { return _mm512_reduce_add_epi32((__m512i)x); }
INLINE int32_t most(Ints x) { return _mm512_reduce_max_epi32((__m512i)x); }

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
INLINE Ints widen(Levels x) {
  const __m128i all = (__m128i)x;
  return joined<Ints>(_mm256_cvtepi8_epi32(all), _mm256_cvtepi8_epi32(_mm_srli_si128(all, 8)));
}
INLINE Levels narrow(Ints x) {  // of numbers that fit
  const Two both = halved(&x);
  const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(both.low, both.high), 0xd8);
  return (Levels)_mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
}
INLINE Words upper(Halves x) {
  const __m128i low = _mm256_castsi256_si128((__m256i)x), high = _mm256_extracti128_si256((__m256i)x, 1);
  return joined<Words>(_mm256_cvtepu16_epi32(low), _mm256_cvtepu16_epi32(high)) << 16;
}
INLINE Halves upper(Words x) {
  x = x >> 16;
  const Two both = halved(&x);
  return (Halves)_mm256_permute4x64_epi64(_mm256_packus_epi32(both.low, both.high), 0xd8);
}
template <class V> INLINE auto total(V x) {
  auto sum = x[0] - x[0];
  for (int i = 0; i < LANES; ++i) sum += x[i];
  return sum;
}
INLINE int32_t most(Ints x) {
  int32_t most = x[0];
  for (int i = 1; i < LANES; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

#endif

// ---- Numbers of 16 and 32 bits

INLINE Floats from_bfloat16(Halves x) { return (Floats)upper(x); }

INLINE Halves to_bfloat16(Floats x) {
#if defined(__AVX512BF16__)
  return (Halves)_mm512_cvtneps_pbh((__m512)x);
#endif
  const Words bits = (Words)x, rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const Words kept = (x == x) ? rounded : (bits | 0x400000);  // NaN stays NaN
  return upper(kept);
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

INLINE float largest(Ints magnitude) {  // of bits of floats without their sign, where NaN is above infinity
  const int32_t bits = most(magnitude);
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

INLINE Ints magnitudes(Floats x) { return (Ints)x & 0x7fffffff; }

// ---- Activations

bool in_tiles(const Weight &w, const Call &c);

// Round 32 numbers. Halves are rounded up, around 128, as the op w8a8_linear says.
INLINE void round_run(const Weight &w, const float *x, float step, const Rounded &to, int64_t run) {
  int32_t sums[2] = {};
  for (int half = 0; half < 2; ++half) {
    const Floats value = load<Floats>(x + half * LANES);
    Ints whole = __builtin_convertvector(value / step + 128.5f, Ints) - 128;
    whole = step == 0 ? Ints{} : whole;
    store(to.level + run * RUN + half * LANES, narrow(whole));
    sums[w.group == LANES ? half : 0] += total(whole);
  }
  to.step[run] = step;
  for (int half = 0; half < 2; ++half) {
    to.sum[run * 2 + half] = step * sums[half];
    to.start[run * 2 + half] = -(int32_t)w.middle * sums[half];
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
  if (!w.by_token && in_tiles(w, c)) {  // which are of bfloat16
    uint16_t *rounded = (uint16_t *)to.level + token * w.runs * RUN;
    for (int64_t i = 0; i < w.runs * RUN; i += LANES) store(rounded + i, to_bfloat16(load<Floats>(row + i)));
    return;
  }
  for (int64_t k = 0; k < w.runs; ++k) {
    const Ints low = magnitudes(load<Floats>(row + k * RUN)), high = magnitudes(load<Floats>(row + k * RUN + LANES));
    const float step = largest(w.by_token ? most : low > high ? low : high) / 127;
    round_run(w, row + k * RUN, step, to, token * w.runs + k);
  }
  int32_t *starts = to.start + token * w.runs * 2;  // the second of the first run's is that of the row
  for (int64_t k = 0; w.by_token && k < w.runs; ++k) starts[1] += starts[k * 2];
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
INLINE Floats scales(const void *values, const uint16_t *outer, int64_t group, int64_t super) {
  if (!outer) return widen(load<Halves>((const uint16_t *)values + group * LANES));
  const Levels level = load<Levels>((const int8_t *)values + group * LANES);
  return __builtin_convertvector(widen(level), Floats) * widen(load<Halves>(outer + super * LANES));
}

// Write sixteen outputs of a token: sums of x times scales, or of whole numbers where a token has one step.
INLINE void write_sums(const Weight &w, const Call &c, const Rounded &, Floats sum, int64_t token, int64_t panel) {
  const int64_t at = panel * LANES, count = w.outputs - at < LANES ? w.outputs - at : LANES;
  if (count <= 0) return;
  Floats y = sum * load<Floats>(w.factor + at);
  if (c.bias) y += read(c.bias, c.type, at, count);
  write(c.y, c.type, token * w.outputs + at, y, count);
}
INLINE void write_sums(const Weight &w, const Call &c, const Rounded &x, Ints sum, int64_t token, int64_t panel) {
  write_sums(w, c, x, __builtin_convertvector(sum, Floats) * x.step[token * w.runs], token, panel);
}

// Sixteen outputs' levels times T tokens from `token` on, where a token has one step: the sums of a row are exact.
template <int T> void whole_rows(const Weight &w, const Call &c, const Rounded &x, int64_t panel, int64_t token) {
  const uint8_t *code = w.code + panel * w.runs * VECTORS * BYTES;
  Ints sum[T];
  UNROLL for (int t = 0; t < T; ++t) sum[t] = all(x.start[(token + t) * w.runs * 2 + 1]);
  for (int64_t k = 0; k < w.runs; ++k, code += VECTORS * BYTES) {
    UNROLL for (int v = 0; v < VECTORS; ++v) {
      const Bytes level = load<Bytes>(code + v * BYTES);
      UNROLL for (int t = 0; t < T; ++t) {
        const int8_t *four = x.level + ((token + t) * w.runs + k) * RUN;
        sum[t] = dot(sum[t], level, load<int32_t>(four + 4 * v));
      }
    }
  }
  for (int t = 0; t < T; ++t) write_sums(w, c, x, sum[t], token + t, panel);
}

// Sixteen outputs of T tokens from `token` on. HALVES: a group has 16 inputs, so a run has two; otherwise whole runs.
template <int BITS, bool HALVES, int T>
void tile(const Weight &w, const Call &c, const Rounded &x, int64_t panel, int64_t token) {
  constexpr int PARTS = HALVES ? 2 : 1;
  const int64_t each = HALVES ? 1 : w.group / RUN, groups = (w.runs + each - 1) / each * PARTS;
  const int64_t supers = w.runs / SUPER;
  const uint8_t *code = w.code + panel * w.runs * BITS * BYTES;
  const Bytes table = w.table ? load<Bytes>(w.table) : Bytes{};
  Floats sum[T] = {};
  for (int64_t first = 0, group = panel * groups; first < w.runs; first += each) {
    const int64_t last = first + each < w.runs ? first + each : w.runs;
    const int64_t super = panel * supers + first / SUPER;
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
        const int8_t *four = x.level + run * RUN;
        UNROLL for (int p = 0; p < PARTS; ++p) {
          Ints whole = all(x.start[run * 2 + p]);
          UNROLL for (int v = p * 4; v < (HALVES ? p * 4 + 4 : VECTORS); ++v)
            whole = dot(whole, level[v], load<int32_t>(four + 4 * v));
          part[p][t] += __builtin_convertvector(whole, Floats) * x.step[run];
          low[p][t] += x.sum[run * 2 + p];
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
  for (int t = 0; t < T; ++t) write_sums(w, c, x, sum[t], token + t, panel);
}

template <int BITS, bool HALVES, int T>
INLINE void some_tokens(const Weight &w, const Call &c, const Rounded &x, int64_t panel, int64_t token) {
  if (BITS == 8 && w.by_token) whole_rows<T>(w, c, x, panel, token);
  else tile<BITS, HALVES, T>(w, c, x, panel, token);
}

template <int BITS, bool HALVES> void panel_products(const Weight &w, const Call &c, const Rounded &x, int64_t panel) {
  int64_t token = 0;
  for (; token + 8 <= c.tokens; token += 8) some_tokens<BITS, HALVES, 8>(w, c, x, panel, token);
  if (c.tokens - token >= 4) some_tokens<BITS, HALVES, 4>(w, c, x, panel, token), token += 4;
  if (c.tokens - token >= 2) some_tokens<BITS, HALVES, 2>(w, c, x, panel, token), token += 2;
  if (c.tokens - token >= 1) some_tokens<BITS, HALVES, 1>(w, c, x, panel, token);
}

// Call `body` with the bits of a code as a constant.
template <class Body> INLINE void with_bits(int64_t bits, Body body) {
  switch (bits) {
    case 2: return body(std::integral_constant<int, 2>());
    case 3: return body(std::integral_constant<int, 3>());
    case 4: return body(std::integral_constant<int, 4>());
    case 5: return body(std::integral_constant<int, 5>());
    case 6: return body(std::integral_constant<int, 6>());
    default: return body(std::integral_constant<int, 8>());
  }
}

#if defined(__AMX_INT8__) && defined(__AMX_BF16__)

// ---- Many tokens: tiles of 16 tokens by 64 bytes of inputs, and of those by 16 outputs

constexpr int TILE = 16 * BYTES;  // bytes
constexpr int64_t SOME = 5, MANY = 24;  // tokens from which on tiles are faster: of bytes, of bfloat16

bool in_tiles(const Weight &w, const Call &c) {
  return c.tiles && c.tokens >= (w.by_token ? SOME : MANY) && (w.by_token || c.type == BFLOAT16);
}

struct Configuration {
  uint8_t palette = 1, zeros[15] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Loads of tiles do not tell the compiler that they read memory.
INLINE void written() { __asm__ volatile("" ::: "memory"); }

INLINE Words rounded_to_bfloat16(Floats x) {
  const Words bits = (Words)x;
  return (x == x) ? bits + 0x7fff + ((bits >> 16) & 1) : bits;
}

// Write sixteen outputs' weights in bfloat16, without their factor: a tile for each run, whose rows are pairs of inputs.
template <int BITS> void unpack(const Weight &w, int64_t panel, char *to) {
  const bool halves = w.group == LANES;
  const int64_t each = halves ? 1 : w.group / RUN, groups = (w.runs + each - 1) / each * (halves ? 2 : 1);
  const Bytes table = w.table ? load<Bytes>(w.table) : Bytes{};
  const uint8_t *code = w.code + panel * w.runs * BITS * BYTES;
  for (int64_t run = 0; run < w.runs; ++run, code += BITS * BYTES, to += TILE) {
    const int64_t super = panel * (w.runs / SUPER) + run / SUPER;
    UNROLL for (int v = 0; v < VECTORS; ++v) {
      const int64_t group = panel * groups + (halves ? run * 2 + v / 4 : run / each);
      const Floats scale = scales(w.scale, w.outer, group, super);
      Floats minimum = scale * (float)w.middle;
      if (w.minimum) minimum = scales(w.minimum, w.outer_minimum, group, super);
      Bytes level = codes<BITS>(code, v);
      if (BITS == 4 && w.table) level = look_up(table, level);
      Words two[4];
      UNROLL for (int i = 0; i < 4; ++i) {
        const Ints whole = (Ints)((Words)level >> 8 * i & 255);
        two[i] = rounded_to_bfloat16(__builtin_convertvector(whole, Floats) * scale - minimum);
      }
      store(to + 2 * v * BYTES, two[0] >> 16 | (two[1] & 0xffff0000));
      store(to + 2 * v * BYTES + BYTES, two[2] >> 16 | (two[3] & 0xffff0000));
    }
  }
}

// All tokens' products with two panels from `panel` on, which `one` and `two` hold in tiles. A step is 64 bytes of inputs.
template <bool BYTE>
void tile_products(const Weight &w, const Call &c, const Rounded &x, int64_t panel, const char *one, const char *two) {
  const int64_t stride = BYTE ? w.runs * RUN : w.runs * RUN * 2, steps = stride / BYTES;
  using Sums = std::conditional_t<BYTE, Ints, Floats>;
  alignas(64) char sums[4][TILE];
  written();
  for (int64_t token = 0; token < c.tokens; token += 32) {
    const char *low = (const char *)x.level + token * stride, *high = low + 16 * stride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < steps; ++k) {
      _tile_loadd(4, low + k * BYTES, stride);
      _tile_loadd(5, high + k * BYTES, stride);
      _tile_loadd(6, one + k * TILE, BYTES);
      _tile_loadd(7, two + k * TILE, BYTES);
      if constexpr (BYTE) {
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 5, 6);
        _tile_dpbsud(2, 4, 7);
        _tile_dpbsud(3, 5, 7);
      } else {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums[0], BYTES);
    _tile_stored(1, sums[1], BYTES);
    _tile_stored(2, sums[2], BYTES);
    _tile_stored(3, sums[3], BYTES);
    for (int t = 0; t < 32 && token + t < c.tokens; ++t)  // both halves of a cache line
      for (int p = 0; p < 2; ++p) {
        Sums sum = load<Sums>(sums[p * 2 + t / 16] + t % 16 * BYTES);
        if constexpr (BYTE) sum += x.start[(token + t) * w.runs * 2 + 1];
        write_sums(w, c, x, sum, token + t, panel + p);
      }
  }
}

// The same for weights as they lie in memory. `room` has space for two panels in bfloat16.
void two_panels(const Weight &w, const Call &c, const Rounded &x, int64_t panel, char *room) {
  const int64_t size = w.runs * TILE, panels = (w.outputs + LANES - 1) / LANES;
  const int64_t second = panel + 1 < panels ? panel + 1 : panel;
  const Configuration configuration;
  written();
  _tile_loadconfig(&configuration);
  if (w.by_token) {
    const char *code = (const char *)w.code;
    tile_products<true>(w, c, x, panel, code + panel * size / 2, code + second * size / 2);
  } else {
    with_bits(w.bits, [&](auto bits) {
      unpack<bits()>(w, panel, room);
      unpack<bits()>(w, second, room + size);
    });
    tile_products<false>(w, c, x, panel, room, room + size);
  }
  _tile_release();
}

#else

bool in_tiles(const Weight &, const Call &) { return false; }
void two_panels(const Weight &, const Call &, const Rounded &, int64_t, char *) {}

#endif

// ---- Threads

// Run `body` for each number below `count`, some at a time for each thread, with the number of the thread.
template <class Body> void for_each(const Call &c, int64_t count, Body body) {
  struct Work {
    Body &body;
    int64_t count, some;
    std::atomic<int64_t> next, threads;
    static void run(void *data) {
      Work &work = *(Work *)data;
      const int64_t thread = work.threads.fetch_add(1);
      for (int64_t first; (first = work.next.fetch_add(work.some)) < work.count;)
        for (int64_t i = first; i < first + work.some && i < work.count; ++i) work.body(i, thread);
    }
  };
  const int64_t pieces = 8 * c.threads;  // so many that a thread that is held up leaves its share to the others
  Work work{body, count, (count + pieces - 1) / pieces, {0}, {0}};
  if (c.threads > 1 && count > 1 && c.parallel) c.parallel(Work::run, &work, (unsigned)c.threads, 0);
  else Work::run(&work);
}

}  // namespace

// Compute y = x · weightᵀ + bias, behind a norm if there is one. Return 0, or 1 if there is no memory.
extern "C" int multiply(const Weight *weight, const Call *call) {
  const Weight &w = *weight;
  const Call &c = *call;
  const bool tiles = in_tiles(w, c);
  const int64_t panels = (w.outputs + LANES - 1) / LANES, width = w.runs * RUN, rows = c.threads > 1 ? c.tokens : 1;
  const int64_t pairs = tiles ? (panels + 1) / 2 : 0, rooms = tiles && !w.by_token ? c.threads : 0;
  const int64_t padded = (c.tokens + 31) / 32 * 32;  // tiles read so many
  const int64_t level = (tiles ? padded : c.tokens) * width * (tiles && !w.by_token ? 2 : 1);
  const int64_t step = c.tokens * w.runs * 4, row = rows * width * 4, room = rooms ? w.runs * 2048 : 0;
  char *memory = (char *)aligned_alloc(64, (level + step * 5 + row + rooms * room + 127) / 64 * 64);
  if (!memory) return 1;
  char *at = memory + rooms * room;
  const Rounded x = {(int8_t *)at, (float *)(at + level), (float *)(at + level + step),
                     (int32_t *)(at + level + step * 3)};
  float *numbers = (float *)(at + level + step * 5);
  for_each(c, c.tokens, [&](int64_t t, int64_t) { round_token(w, c, t, numbers + (rows > 1 ? t * width : 0), x); });
  for_each(c, pairs, [&](int64_t pair, int64_t thread) { two_panels(w, c, x, pair * 2, memory + thread * room); });
  for_each(c, tiles ? 0 : panels, [&](int64_t panel, int64_t) {
    with_bits(w.bits, [&](auto bits) {
      w.group == LANES ? panel_products<bits(), true>(w, c, x, panel) : panel_products<bits(), false>(w, c, x, panel);
    });
  });
  free(memory);
  return 0;
}
