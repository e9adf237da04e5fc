// Products on vector units: sixteen outputs, one in each lane, times some tokens.

#pragma once

#include "weights.h"

namespace {

constexpr int64_t AHEAD = 1024;  // bytes of codes, which are asked for so early: a CPU by itself does not cross pages

// Sixteen outputs' levels times T tokens from `token` on, where a token has one step: the sums of a row are exact.
template <int T> void whole_rows(const Weight &w, const Call &c, const Rounded &x, int64_t panel, int64_t token) {
  const uint8_t *code = w.code + panel * w.runs * VECTORS * BYTES;
  const char *x_t = x.at(token, 0);
  Ints sum[T];
  UNROLL for (int t = 0; t < T; ++t) sum[t] = all(x.start[token + t]);
  for (int64_t k = 0; k < w.runs; ++k, code += VECTORS * BYTES, x_t += x.side * RUN) {
    Bytes level[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; ++v) {
      __builtin_prefetch(code + AHEAD + v * BYTES);
      level[v] = load<Bytes>(code + v * BYTES);
    }
    UNROLL for (int t = 0; t < T; ++t) sum[t] = dots<8, VECTORS>(sum[t], level, x_t + t * RUN);
  }
  for (int t = 0; t < T; ++t) write_sums(w, c, x, sum[t], token + t, panel);
}

// Sixteen outputs of T tokens from `token` on. HALVES: a group has 16 inputs, so a run has two; otherwise whole runs.
// TABLE: codes of 4 bits stand for the numbers of a table.
template <int BITS, bool HALVES, int T, bool TABLE>
void tile(const Weight &w, const Call &c, const Rounded &x, int64_t panel, int64_t token) {
  constexpr int PARTS = HALVES ? 2 : 1, WIDE = TABLE ? 8 : BITS;  // WIDE: bits of a number that is multiplied
  const int64_t each = HALVES ? 1 : w.group / RUN, groups = (w.runs + each - 1) / each * PARTS;
  const int64_t supers = w.runs / SUPER;
  const uint8_t *code = w.code + panel * w.runs * BITS * BYTES;
  const Bytes table = TABLE ? load<Bytes>(w.table) : Bytes{};
  Floats sum[T] = {};
  int64_t run = x.run(token, 0);
  for (int64_t first = 0, group = panel * groups; first < w.runs; first += each) {
    const int64_t last = first + each < w.runs ? first + each : w.runs;
    const int64_t super = panel * supers + first / SUPER;
    Floats part[PARTS][T] = {};
    float low[PARTS][T] = {};
    for (int64_t k = first; k < last; ++k, code += BITS * BYTES, run += x.side) {
      Bytes level[VECTORS];
      UNROLL for (int b = 0; b < BITS; ++b) __builtin_prefetch(code + AHEAD + b * BYTES);
      UNROLL for (int v = 0; v < VECTORS; ++v) {
        level[v] = codes<BITS>(code, v);
        if (TABLE) level[v] = look_up(table, level[v]);
      }
      UNROLL for (int t = 0; t < T; ++t) {
        const char *four = x.level + (run + t) * RUN;
        UNROLL for (int p = 0; p < PARTS; ++p) {
          const Ints whole = dots<WIDE, VECTORS / PARTS>(all(x.start[(run + t) * 2 + p]), level + p * 4, four + p * 16);
          part[p][t] += floats(whole) * x.step[run + t];
          low[p][t] += x.sum[(run + t) * 2 + p];
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
  else if (BITS == 4 && w.table) tile<BITS, HALVES, T, BITS == 4>(w, c, x, panel, token);
  else tile<BITS, HALVES, T, false>(w, c, x, panel, token);
}

template <int BITS, bool HALVES> void panel_products(const Weight &w, const Call &c, const Rounded &x, int64_t panel) {
  int64_t token = 0;
  for (; token + 8 <= c.tokens; token += 8) some_tokens<BITS, HALVES, 8>(w, c, x, panel, token);
  if (c.tokens - token >= 4) some_tokens<BITS, HALVES, 4>(w, c, x, panel, token), token += 4;
  if (c.tokens - token >= 2) some_tokens<BITS, HALVES, 2>(w, c, x, panel, token), token += 2;
  if (c.tokens - token >= 1) some_tokens<BITS, HALVES, 1>(w, c, x, panel, token);
}

}  // namespace
