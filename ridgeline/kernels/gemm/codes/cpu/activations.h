// Activations: read, normalised if that is asked for, and rounded to int8.

#pragma once

#include "call.h"
#include "numbers.h"

namespace {

// Write sixteen numbers' levels, and return these. Halves are rounded up, around 128, as the op w8a8_linear says.
INLINE Ints round_some(const float *x, float step, char *level) {
  const Ints whole = ints(load<Floats>(x) / step + 128.5f) - 128;
  const Ints found = step == 0 ? Ints{} : whole;
  store(level, narrow(found));
  return found;
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

// Round a token with one step. The sum of its levels is what each product of a row begins with.
void round_row(const Weight &w, int64_t token, const float *row, const Rounded &to) {
  Ints most = {}, sum = {};
  for (int64_t i = 0; i < w.runs * RUN; i += LANES) {
    const Ints here = magnitudes(load<Floats>(row + i));
    most = choose(here > most, here, most);
  }
  const float step = largest(most) / 127;
  for (int64_t i = 0; i < w.runs * RUN; i += LANES) sum += round_some(row + i, step, to.at(token, i));
  to.step[token] = step;
  to.start[token] = -(int32_t)w.middle * total(sum);
}

// Round a token with a step for each run.
void round_runs(const Weight &w, int64_t token, const float *row, const Rounded &to) {
  for (int64_t k = 0; k < w.runs; ++k, row += RUN) {
    const int64_t run = to.run(token, k);
    const Ints low = magnitudes(load<Floats>(row)), high = magnitudes(load<Floats>(row + LANES));
    const float step = largest(choose(low > high, low, high)) / 127;
    int32_t sums[2] = {};
    for (int half = 0; half < 2; ++half)
      sums[w.group == LANES ? half : 0] +=
          total(round_some(row + half * LANES, step, to.at(token, k * RUN + half * LANES)));
    to.step[run] = step;
    for (int half = 0; half < 2; ++half) {
      to.sum[run * 2 + half] = step * sums[half];
      to.start[run * 2 + half] = -(int32_t)w.middle * sums[half];
    }
  }
}

void round_token(const Weight &w, const Call &c, int64_t token, float *row, const Rounded &to) {
  gather(w, c, token, row);
  if (w.by_token) return round_row(w, token, row, to);
  if (!to.tiles) return round_runs(w, token, row, to);
  for (int64_t i = 0; i < w.runs * RUN; i += LANES) store(to.at(token, i * 2), to_bfloat16(load<Floats>(row + i)));
}

}  // namespace
