// Products of tokens with their own experts' matrices on a CPU, in float32 or bfloat16, with sums in float32. panels.py,
// a folder above, lays the matrices out.
//
// A panel has thirty-two outputs of an expert, and is read from end to end. If there is a gate, these are sixteen of
// the gate and the sixteen of up that they multiply, so that what is written is the activation.
//
// The file is compiled, with all that it includes, for the machine that it runs on, which has AVX2 at least.

#include <cmath>
#include <vector>

#include "../../codes/cpu/threads.h"
#include "exponential.h"
#include "products.h"

namespace {

INLINE Floats erf_of(Floats x) {
  for (int i = 0; i < LANES; ++i) ((float *)&x)[i] = erff(((float *)&x)[i]);
  return x;
}

INLINE Floats activate(Floats x, int64_t kind) {
  const Floats zero = {};
  switch (kind) {
    case SILU: return x / (exponential(zero - x) + 1.0f);
    case GELU: return x * 0.5f * (erf_of(x * 0.70710678f) + 1.0f);
    case GELU_TANH: return x * sigmoid((x + x * x * x * 0.044715f) * 1.59576912f);  // tanh y is 2 sigmoid(2 y) - 1
    default: {                                                                       // RELU2
      const Floats kept = choose(zero > x, zero, x);  // NaN stays NaN
      return kept * kept;
    }
  }
}

INLINE Floats gated(Floats gate, Floats up, int64_t kind) {
  if (kind != SWIGLU_CLAMPED && kind != SILU_CLAMPED_7 && kind != SILU_CLAMPED_16) return activate(gate, kind) * up;
  const float most = kind == SILU_CLAMPED_16 ? 16.0f : 7.0f;
  const Floats zero = {}, limit = zero + most, least = zero - most;
  if (kind != SWIGLU_CLAMPED) gate = activate(gate, SILU);
  gate = choose(gate > limit, limit, gate);
  up = choose(up > limit, limit, choose(least > up, least, up));
  if (kind != SWIGLU_CLAMPED) return gate * up;
  return gate * sigmoid(gate * 1.702f) * (up + 1.0f);
}

// The experts that have pairs.
std::vector<int32_t> reached(const Experts &w, const Call &c) {
  std::vector<int32_t> found;
  for (int32_t e = 0; e < w.experts; ++e)
    if (c.start[e] < c.start[e + 1]) found.push_back(e);
  return found;
}

template <class Number> void gate_up(const Experts &w, const Call &c) {
  const std::vector<int32_t> some = reached(w, c);
  const int64_t steps = w.inputs / Number::INPUTS, each = c.gated ? LANES : WIDE, inner = w.outputs / (c.gated ? 2 : 1);
  const int64_t panels = (inner + each - 1) / each;
  for_each(c, (int64_t)some.size() * panels, [&](int64_t item, int64_t) {
    const int64_t expert = some[item / panels], panel = item % panels, at = panel * each;
    const int64_t count = lanes(inner - at), more = c.gated ? 0 : lanes(inner - at - LANES);
    const int64_t bias = expert * w.outputs + at, second = bias + (c.gated ? inner : LANES);
    const auto row = [&](int64_t pair) { return (const char *)c.x + c.token[pair] * w.inputs * Number::SIZE; };
    each_row<Number>(panel_of<Number>(w, expert, panels, panel), steps, c.start[expert], c.start[expert + 1], row,
                     [&](int64_t pair, Floats low, Floats high) {
      if (c.bias) low += read(c.bias, Number::TYPE, bias, count);
      if (c.bias) high += read(c.bias, Number::TYPE, second, c.gated ? count : more);
      const int64_t to = pair * inner + at;
      write(c.y, Number::TYPE, to, c.gated ? gated(low, high, c.activation) : activate(low, c.activation), count);
      if (more) write(c.y, Number::TYPE, to + LANES, activate(high, c.activation), more);
    });
  });
}

// A thread adds up all of a token's experts, in the order of their numbers, for some outputs.
template <class Number> void down(const Experts &w, const Call &c) {
  const std::vector<int32_t> some = reached(w, c);
  const int64_t steps = w.inputs / Number::INPUTS, panels = (w.outputs + WIDE - 1) / WIDE;
  const int64_t pairs = c.start[w.experts];
  std::vector<float> weight(pairs);
  std::vector<int32_t> token(pairs);
  for (int64_t i = 0; i < c.tokens * c.used; ++i) {
    if (c.expert[i] < 0 || c.expert[i] >= w.experts) continue;
    weight[c.place[i]] = c.weight[i];
    token[c.place[i]] = (int32_t)(i / c.used);
  }
  std::vector<float> room(c.threads * c.tokens * WIDE);
  for_each(c, panels, [&](int64_t panel, int64_t thread) {
    float *sums = room.data() + thread * c.tokens * WIDE;
    memset(sums, 0, c.tokens * WIDE * sizeof(float));
    const int64_t at = panel * WIDE, count = lanes(w.outputs - at), more = lanes(w.outputs - at - LANES);
    for (const int64_t expert : some) {
      const auto row = [&](int64_t pair) { return (const char *)c.x + pair * w.inputs * Number::SIZE; };
      Floats bias[2] = {};
      if (c.bias) bias[0] = read(c.bias, Number::TYPE, expert * w.outputs + at, count);
      if (c.bias) bias[1] = read(c.bias, Number::TYPE, expert * w.outputs + at + LANES, more);
      each_row<Number>(panel_of<Number>(w, expert, panels, panel), steps, c.start[expert], c.start[expert + 1], row,
                       [&](int64_t pair, Floats low, Floats high) {
        float *sum = sums + token[pair] * WIDE;
        store(sum, load<Floats>(sum) + (low + bias[0]) * weight[pair]);
        store(sum + LANES, load<Floats>(sum + LANES) + (high + bias[1]) * weight[pair]);
      });
    }
    for (int64_t t = 0; t < c.tokens; ++t) {
      const int64_t to = t * w.outputs + at;
      Floats low = load<Floats>(sums + t * WIDE), high = load<Floats>(sums + t * WIDE + LANES);
      if (c.add) low += read(c.add, Number::TYPE, to, count);
      if (c.add) high += read(c.add, Number::TYPE, to + LANES, more);
      write(c.y, Number::TYPE, to, low, count);
      if (more) write(c.y, Number::TYPE, to + LANES, high, more);
    }
  });
}

}  // namespace

extern "C" void grouped_gate_up(const Experts *w, const Call *c) {
  w->type == FLOAT32 ? gate_up<Plain>(*w, *c) : gate_up<Paired>(*w, *c);
}

extern "C" void grouped_down(const Experts *w, const Call *c) {
  w->type == FLOAT32 ? down<Plain>(*w, *c) : down<Paired>(*w, *c);
}
