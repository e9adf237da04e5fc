// Linear maps on a CPU of weights in codes of 2 to 8 bits, with activations rounded to int8. panels.py, a folder above,
// lays weights out.
//
// Sixteen outputs are computed together, one in each lane. Their weights are a panel, which is read from end to end:
// for each run of 32 inputs eight vectors of 64 bytes, of which vector v has four inputs (4v to 4v + 3) of each output.
// One instruction adds four products of bytes to each lane. The codes of narrow planes lie beside each other in a byte:
// a plane of W bits has W vectors for a run, and vector v's codes are those of vector v % W, W * (v / W) bits up.
//
// The sums of a run are whole numbers; each is multiplied by the run's step of the activations, and by the scale of its
// group of weights. What is subtracted from codes (a middle, or a minimum) is multiplied with the sum of the inputs.
//
// The file is compiled, with all that it includes, for the machine that it runs on, which has AVX2 at least.

#include <cstdlib>

#include "activations.h"
#include "lanes.h"
#include "threads.h"
#include "tiles.h"

// Compute y = x · weightᵀ + bias, behind a norm if there is one. Return 0, or 1 if there is no memory.
extern "C" int multiply(const Weight *weight, const Call *call) {
  const Weight &w = *weight;
  const Call &c = *call;
  if (!c.tokens) return 0;
  const bool tiles = in_tiles(w, c);
  const int64_t panels = (w.outputs + LANES - 1) / LANES, pairs = (panels + 1) / 2, inputs = w.runs * RUN;
  const int64_t share = pairs / (4 * c.threads);
  const int64_t some = share < 1 ? 1 : share < PAIRS ? share : PAIRS;  // pairs of panels that a thread takes at once
  const int64_t row = inputs * 4, sums = tiles ? room_of_tiles(c, some) : 0;
  const int64_t room = row > sums ? row : sums;  // bytes of a thread
  const int64_t side = tiles ? 32 : c.tokens < SIDE ? c.tokens : SIDE, tokens = (c.tokens + side - 1) / side * side;
  const int64_t width = tiles && !w.by_token ? inputs * 2 : inputs, level = tokens * width;
  const int64_t steps = tokens * (w.by_token ? 1 : w.runs) * 4;
  char *memory = (char *)aligned_alloc(64, (c.threads * room + level + steps * 5 + 63) / 64 * 64);
  if (!memory) return 1;
  Rounded x = {};
  x.runs = w.runs, x.side = side, x.width = width, x.tiles = tiles;
  x.level = memory + c.threads * room;
  x.step = (float *)(x.level + level);
  x.sum = (float *)(x.level + level + steps);
  x.start = (int32_t *)(x.level + level + steps * 3);
  for_each(c, c.tokens, [&](int64_t t, int64_t thread) { round_token(w, c, t, (float *)(memory + thread * room), x); });
  for_each(c, tiles ? (pairs + some - 1) / some : 0, [&](int64_t i, int64_t thread) {
    const int64_t first = i * some, last = first + some < pairs ? first + some : pairs;
    tile_products(w, c, x, first, last, memory + thread * room);
  });
  for_each(c, tiles ? 0 : panels, [&](int64_t panel, int64_t) {
    with_bits(w.bits, [&](auto bits) {
      w.group == LANES ? panel_products<bits(), true>(w, c, x, panel) : panel_products<bits(), false>(w, c, x, panel);
    });
  });
  free(memory);
  return 0;
}
