// Products of many tokens on AMX: tiles of 16 tokens by 64 bytes of inputs, and of those by 16 outputs.

#pragma once

#include "weights.h"

namespace {

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)

constexpr int TILE = 16 * BYTES;  // bytes
constexpr int64_t SOME = 5, MANY = 24;  // tokens from which on tiles are faster: of bytes, of bfloat16
constexpr int64_t STEPS = 16;           // of 64 bytes of inputs: a block of two panels' weights has 32 KiB
constexpr int64_t PAIRS = 8;            // of panels, and
constexpr int64_t TOKENS = 512;         // of which: sums of so many and a block of their inputs have 1 MiB

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

// Pairs of a low and a high number in each lane, in bfloat16.
INLINE Bytes paired(Floats low, Floats high) {
  alignas(64) static constexpr uint16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  return (Bytes)_mm512_permutexvar_epi16(_mm512_load_si512(ORDER), halves);
}

// Write sixteen outputs' weights of some runs in bfloat16, without their factor: a tile for each run, whose rows are
// pairs of inputs. HALVES: a group has 16 inputs, so a run has two.
template <int BITS, bool HALVES> void unpack(const Weight &w, int64_t panel, int64_t first, int64_t count, char *to) {
  constexpr int PARTS = HALVES ? 2 : 1;
  const int64_t each = HALVES ? 1 : w.group / RUN, groups = (w.runs + each - 1) / each * PARTS;
  const uint8_t *code = w.code + (panel * w.runs + first) * BITS * BYTES;
  Floats levels = {};  // of the first sixteen codes
  for (int i = 0; i < LANES; ++i) levels[i] = w.table ? w.table[i] : i;
  for (int64_t run = first; run < first + count; ++run, code += BITS * BYTES) {
    const int64_t super = panel * (w.runs / SUPER) + run / SUPER, group = panel * groups + run / each * PARTS;
    for (int p = 0; p < PARTS; ++p) {
      const Floats scale = scales(w.scale, w.outer, group + p, super);
      const Floats minimum =
          w.minimum ? scales(w.minimum, w.outer_minimum, group + p, super) : scale * (float)w.middle;
      UNROLL for (int v = p * 4; v < (HALVES ? p * 4 + 4 : VECTORS); ++v, to += 2 * BYTES) {
        const Words code_4 = (Words)codes<BITS>(code, v);
        Floats x[4];
        UNROLL for (int i = 0; i < 4; ++i) {
          const Words one = code_4 >> 8 * i;
          if (BITS <= 4) x[i] = (Floats)_mm512_permutexvar_ps((__m512i)one, (__m512)levels);
          else x[i] = floats((Ints)(one & 255));
          x[i] = x[i] * scale - minimum;
        }
        store(to, paired(x[0], x[1]));
        store(to + BYTES, paired(x[2], x[3]));
      }
    }
  }
}

// The same for any weight.
void unpack(const Weight &w, int64_t panel, int64_t first, int64_t count, char *to) {
  with_bits(w.bits, [&](auto bits) {
    const auto some = w.group == LANES ? unpack<bits(), true> : unpack<bits(), false>;
    some(w, panel, first, count, to);
  });
}

INLINE void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

INLINE void load_sums(const char *from) {
  _tile_loadd(0, from, BYTES);
  _tile_loadd(1, from + TILE, BYTES);
  _tile_loadd(2, from + TILE * 2, BYTES);
  _tile_loadd(3, from + TILE * 3, BYTES);
}

INLINE void store_sums(char *to) {
  _tile_stored(0, to, BYTES);
  _tile_stored(1, to + TILE, BYTES);
  _tile_stored(2, to + TILE * 2, BYTES);
  _tile_stored(3, to + TILE * 3, BYTES);
}

// Add the products of 32 tokens and two panels over some steps, of 64 bytes of inputs each, to four tiles of sums.
template <bool BYTE>
INLINE void add_products(const char *low, const char *high, const char *one, const char *two, int64_t steps) {
  for (int64_t k = 0; k < steps; ++k) {
    _tile_loadd(4, low + k * TILE, BYTES);
    _tile_loadd(6, one + k * TILE, BYTES);
    _tile_loadd(5, high + k * TILE, BYTES);
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
}

// Write the outputs of some pairs of panels and the tokens from `begin` on, each token's side by side.
template <bool BYTE>
void write_tiles(const Weight &w, const Call &c, const Rounded &x, const char *sums, int64_t begin, int64_t end,
                 int64_t first, int64_t last) {
  using Sums = std::conditional_t<BYTE, Ints, Floats>;
  const int64_t size = (end - begin + 31) / 32 * 4 * TILE;  // of a pair's sums
  for (int64_t token = begin; token < end; ++token) {
    const int64_t t = token - begin;
    const char *from = sums + t / 32 * 4 * TILE + t % 32 * BYTES;
    for (int64_t panel = first * 2; panel < last * 2; ++panel) {
      Sums sum = load<Sums>(from + (panel / 2 - first) * size + panel % 2 * 2 * TILE);
      if constexpr (BYTE) sum += x.start[token];
      write_sums(w, c, x, sum, token, panel);
    }
  }
}

// Products of some pairs of panels with all tokens. A block of inputs' weights for two panels stays in the first cache
// while tokens pass, and these tokens' block in the second while pairs pass.
template <bool BYTE>
void some_pairs(const Weight &w, const Call &c, const Rounded &x, int64_t first, int64_t last, char *room) {
  const int64_t steps = x.width / BYTES, panels = (w.outputs + LANES - 1) / LANES;
  char *const sums = room + STEPS * 2 * TILE;
  for (int64_t begin = 0; begin < c.tokens; begin += TOKENS) {
    const int64_t end = begin + TOKENS < c.tokens ? begin + TOKENS : c.tokens;
    for (int64_t step = 0; step < steps; step += STEPS) {
      const int64_t count = step + STEPS < steps ? STEPS : steps - step;
      char *sum = sums;
      for (int64_t pair = first; pair < last; ++pair) {
        const int64_t panel = pair * 2, second = panel + 1 < panels ? panel + 1 : panel;
        const char *one = room, *two = room + STEPS * TILE;
        if constexpr (BYTE) {
          one = (const char *)w.code + (panel * steps + step) * TILE;
          two = (const char *)w.code + (second * steps + step) * TILE;
        } else {
          unpack(w, panel, step, count, room);
          unpack(w, second, step, count, room + STEPS * TILE);
        }
        written();
        for (int64_t token = begin; token < end; token += 32, sum += 4 * TILE) {
          if (step) load_sums(sum);
          else zero_sums();
          add_products<BYTE>(x.at(token, step * BYTES), x.at(token + 16, step * BYTES), one, two, count);
          store_sums(sum);
          written();
        }
      }
    }
    write_tiles<BYTE>(w, c, x, sums, begin, end, first, last);
  }
}

// The bytes of `room` that `some_pairs` needs.
int64_t room_of_tiles(const Call &c, int64_t pairs) {
  const int64_t tokens = c.tokens < TOKENS ? c.tokens : TOKENS;
  return (STEPS * 2 + pairs * ((tokens + 31) / 32) * 4) * TILE;
}

void tile_products(const Weight &w, const Call &c, const Rounded &x, int64_t first, int64_t last, char *room) {
  const Configuration configuration;
  written();
  _tile_loadconfig(&configuration);
  w.by_token ? some_pairs<true>(w, c, x, first, last, room) : some_pairs<false>(w, c, x, first, last, room);
  _tile_release();
}

#else

constexpr int64_t PAIRS = 1;
bool in_tiles(const Weight &, const Call &) { return false; }
int64_t room_of_tiles(const Call &, int64_t) { return 0; }
void tile_products(const Weight &, const Call &, const Rounded &, int64_t, int64_t, char *) {}

#endif

}  // namespace
