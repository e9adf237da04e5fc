// Routing of tokens to experts on a CPU: norm, the router's products, the choice, and the order of pairs. native.py, a
// folder above, says what it is given. Numbers are float32 once they are read.
//
// The file is compiled, with all that it includes, for the machine that it runs on, which has AVX2 at least.

#include <cmath>
#include <cstring>
#include <vector>

#include "../../codes/cpu/numbers.h"
#include "../../codes/cpu/threads.h"

namespace {

constexpr float NORMALIZER = 1e-20f;   // added to a sum of weights before it divides them
constexpr int64_t TOKENS = 2, SOME = 4;  // tokens and experts that are multiplied together
constexpr int64_t WORTH = 1 << 17;  // products that take as long as it takes to wake a thread, some microseconds

extern "C" struct Router {
  const void *weight;             // [experts, width], of `weight_type`
  const float *bias, *correction, *scale;  // [experts], or null
  int64_t experts, width, weight_type, used, sigmoid, renormalize, groups, top_groups, by_two;
  float factor, nearness;  // nearness: that of "sparsemixer"; below 0: the score is another one
};

extern "C" struct Call {
  const void *x, *residual, *norm;  // [tokens, width], the same or null, [width] or null
  const uint8_t *live;              // [tokens], or null
  void *sum, *normed;               // [tokens, width]; the same as x where nothing is added, or nothing normalised
  int32_t *expert, *token, *place, *start;
  float *weight;
  int64_t *tally;  // [experts], or null
  int64_t tokens, type, norm_type, threads;
  float eps;
  void (*parallel)(void (*)(void *), void *, unsigned, unsigned);  // OpenMP's, or null
};

// The call with as many threads as so much work is worth.
Call with_threads(Call c, int64_t products) {
  if (products < WORTH) c.threads = 1;
  return c;
}

INLINE int64_t lanes(int64_t left) { return left < LANES ? left : LANES; }

INLINE Floats rounded(Floats x, int64_t type) {
  return type == FLOAT32 ? x : type == BFLOAT16 ? from_bfloat16(to_bfloat16(x)) : widen(narrow(x));
}

// Add the residual and normalise a token, as far as these are asked for.
void normalise(const Router &r, const Call &c, int64_t token) {
  const int64_t first = token * r.width;
  if (!c.residual && !c.norm) return;
  Floats squares = {};
  for (int64_t i = 0; i < r.width; i += LANES) {
    const int64_t count = lanes(r.width - i);
    Floats x = read(c.x, c.type, first + i, count);
    if (c.residual) {
      x = rounded(x + read(c.residual, c.type, first + i, count), c.type);
      write(c.sum, c.type, first + i, x, count);
    }
    squares += x * x;
  }
  if (!c.norm) return;
  const float scale = 1 / std::sqrt(total(squares) / r.width + c.eps);
  for (int64_t i = 0; i < r.width; i += LANES) {
    const int64_t count = lanes(r.width - i);
    const Floats x = read(c.sum, c.type, first + i, count) * scale;
    write(c.normed, c.type, first + i, x * read(c.norm, c.norm_type, i, count), count);
  }
}

// Products of T tokens and E experts. Each goes through the width in its order, sixteen sums at a time.
template <int T, int E> void products(const Router &r, const Call &c, int64_t token, int64_t expert, float *logits) {
  Floats sum[T][E] = {};
  for (int64_t i = 0; i < r.width; i += LANES) {
    const int64_t count = lanes(r.width - i);
    Floats x[T];
    UNROLL for (int t = 0; t < T; ++t) x[t] = read(c.normed, c.type, (token + t) * r.width + i, count);
    UNROLL for (int e = 0; e < E; ++e) {
      const Floats weight = read(r.weight, r.weight_type, (expert + e) * r.width + i, count);
      UNROLL for (int t = 0; t < T; ++t) sum[t][e] += x[t] * weight;
    }
  }
  for (int t = 0; t < T; ++t)
    for (int e = 0; e < E; ++e)
      logits[(token + t) * r.experts + expert + e] = total(sum[t][e]) + (r.bias ? r.bias[expert + e] : 0);
}

template <int T> void some_products(const Router &r, const Call &c, int64_t token, int64_t expert, float *logits) {
  if (r.experts - expert >= SOME) return products<T, SOME>(r, c, token, expert, logits);
  for (; expert < r.experts; ++expert) products<T, 1>(r, c, token, expert, logits);
}

// A sort in falling order, as torch has it: NaN is above all numbers.
INLINE bool above(float one, float other) { return one > other || (one != one && other == other); }

// Write the places of the `count` largest numbers, the first of equal ones first.
void largest(const float *number, int64_t numbers, int64_t count, int32_t *place) {
  for (int64_t found = 0; found < count; ++found) {
    int32_t best = -1;
    for (int32_t i = 0; i < numbers; ++i) {
      bool taken = false;
      if (best >= 0 && !above(number[i], number[best])) continue;
      for (int64_t k = 0; k < found; ++k) taken |= place[k] == i;
      if (!taken) best = i;
    }
    place[found] = best;
  }
}

// Each chosen expert's share in the softmax over those near it that were not chosen before.
void write_shares(const Router &r, const float *scores, const int32_t *expert, float *weight) {
  for (int64_t k = 0; k < r.used; ++k) {
    const float best = scores[expert[k]];
    float sum = best != best ? best : 0;
    for (int64_t e = 0; e < r.experts; ++e) {
      bool taken = (best - scores[e]) / std::fmax(std::fabs(scores[e]), best) > r.nearness;
      for (int64_t before = 0; before < k; ++before) taken |= expert[before] == e;
      if (!taken) sum += std::exp(scores[e] - best);
    }
    weight[k] = 1 / sum;
  }
}

// Turn logits into scores. One NaN is a NaN for all of a token's.
void score(const Router &r, float *logit) {
  float most = -INFINITY, sum = 0;
  if (r.nearness >= 0) {
    bool nan = false;
    for (int64_t e = 0; e < r.experts; ++e) nan |= logit[e] != logit[e];
    for (int64_t e = 0; nan && e < r.experts; ++e) logit[e] = NAN;
    return;
  }
  for (int64_t e = 0; e < r.experts; ++e) most = above(logit[e], most) ? logit[e] : most;
  for (int64_t e = 0; e < r.experts; ++e) {
    logit[e] = r.sigmoid ? 1 / (1 + std::exp(-logit[e])) : std::exp(logit[e] - most);
    sum += logit[e];
  }
  for (int64_t e = 0; e < r.experts; ++e) logit[e] = r.sigmoid ? logit[e] + 0 * sum : logit[e] / sum;
}

// Refuse the experts of groups other than the best.
void keep_best_groups(const Router &r, float *choice, std::vector<float> &group, std::vector<int32_t> &best) {
  const int64_t each = r.experts / r.groups;
  for (int64_t g = 0; g < r.groups; ++g) {
    int32_t two[2];
    largest(choice + g * each, each, r.by_two ? 2 : 1, two);
    group[g] = choice[g * each + two[0]] + (r.by_two ? choice[g * each + two[1]] : 0);
  }
  largest(group.data(), r.groups, r.top_groups, best.data());
  for (int64_t g = 0; g < r.groups; ++g) {
    bool kept = false;
    for (int64_t k = 0; k < r.top_groups; ++k) kept |= best[k] == g;
    for (int64_t e = g * each; !kept && e < (g + 1) * each; ++e) choice[e] = -INFINITY;
  }
}

// Choose the experts of a token, and what they count.
void choose_experts(const Router &r, const Call &c, int64_t token, float *scores) {
  score(r, scores);
  std::vector<float> changed, group(r.groups);
  std::vector<int32_t> best(r.groups);
  float *choice = scores;
  if (r.correction || r.groups > 1) {
    changed.assign(scores, scores + r.experts);
    choice = changed.data();
  }
  for (int64_t e = 0; r.correction && e < r.experts; ++e) choice[e] += r.correction[e];
  if (r.groups > 1) keep_best_groups(r, choice, group, best);
  int32_t *expert = c.expert + token * r.used;
  float *weight = c.weight + token * r.used, sum = 0;
  largest(choice, r.experts, r.used, expert);
  for (int64_t k = 0; k < r.used; ++k) weight[k] = scores[expert[k]];
  if (r.nearness >= 0) write_shares(r, scores, expert, weight);
  for (int64_t k = 0; k < r.used; ++k) sum += weight[k];
  for (int64_t k = 0; k < r.used; ++k) {
    if (r.renormalize) weight[k] /= sum + NORMALIZER;
    weight[k] *= r.factor;
    if (r.scale) weight[k] *= r.scale[expert[k]];
  }
  for (int64_t k = 0; c.live && !c.live[token] && k < r.used; ++k) expert[k] = (int32_t)r.experts;
}

// Sort the pairs by expert. Those of one expert keep the order of their tokens.
void put_in_order(const Router &r, const Call &c) {
  const int64_t pairs = c.tokens * r.used;
  std::vector<int32_t> next(r.experts + 2);
  for (int64_t i = 0; i < pairs; ++i) ++next[c.expert[i] + 1];
  for (int64_t e = 0; c.tally && e < r.experts; ++e) c.tally[e] += next[e + 1];
  for (int64_t e = 0; e <= r.experts; ++e) next[e + 1] += next[e];
  memcpy(c.start, next.data(), (r.experts + 1) * sizeof(int32_t));
  for (int64_t i = 0; i < pairs; ++i) {
    c.place[i] = next[c.expert[i]]++;
    c.token[c.place[i]] = (int32_t)(i / r.used);
  }
}

}  // namespace

extern "C" void route(const Router *router, const Call *call) {
  const Router &r = *router;
  const Call &c = *call;
  std::vector<float> logits(c.tokens * r.experts);
  const int64_t tokens = (c.tokens + TOKENS - 1) / TOKENS, experts = (r.experts + SOME - 1) / SOME;
  for_each(with_threads(c, c.tokens * r.width), c.tokens, [&](int64_t token, int64_t) { normalise(r, c, token); });
  for_each(with_threads(c, c.tokens * r.experts * r.width), tokens * experts, [&](int64_t item, int64_t) {
    const int64_t token = item / experts * TOKENS, expert = item % experts * SOME;
    if (c.tokens - token >= TOKENS) some_products<TOKENS>(r, c, token, expert, logits.data());
    else some_products<1>(r, c, token, expert, logits.data());
  });
  for_each(with_threads(c, c.tokens * r.experts * (16 + r.used)), c.tokens, [&](int64_t token, int64_t) {
    choose_experts(r, c, token, logits.data() + token * r.experts);
  });
  put_in_order(r, c);
}
