"""The bound on the inter-token latency (ITL): how many prompt tokens a step may run beside requests that decode.

Requests that decode wait for the whole step, and a prompt of 16,384 tokens makes a step of a few milliseconds last half
a second. The cost model gives the least time of a step. The measured times of steps, divided by that, correct it.

If many requests decode, a tight bound would starve prompts: each step would read all keys of the decoding rows for a
few prompt tokens. So a step may always last `DECODE_STEPS` times as long as its decoding rows alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from ridgeline.core.plan.step import RowKind, StepPlan
from ridgeline.kernels.base.cost import CostModel, StepShape, SumModel

DECODE_STEPS = 3  # at this many, the balance of prompts and decodes of a server at its limit is not disturbed
LEAST = 64  # prompt tokens that every step may run
CLOSE = 16  # tokens between the sizes of steps below a tile
SPARE = 8  # tokens by which a size must fit: what bounds a step is not known that closely
FIRST_GUESS = 1.3  # time of a mixed step divided by its limit, before any was measured (8B on an H200: 1.25 to 1.4)
MOST = 100.0  # of that ratio: a machine that was suspended for an hour says nothing about steps
KEPT_SIZES = 1024  # numbers of rows whose sizes are kept
CHUNK = int(RowKind.CHUNK)
MEMORY = 0.1  # weight of the newest step in that ratio
# A server's steps with prompts last so many times as long as reading the weights once, or so many seconds if that is
# more. With less, prompts run below the rate of a large step; with more, decoding requests wait longer for nothing.
ITL_READS, LEAST_ITL = 6, 0.010


def choose_itl_target(wanted: float | None, cost_model: CostModel | None, *, interactive: bool) -> float | None:
    """Return the target for the time between tokens in seconds, or None for no bound.

    `wanted` is in milliseconds: 0 for no bound, None for what suits the model and the device.
    """
    if wanted is not None:
        return wanted / 1000 or None
    if not interactive or cost_model is None:
        return None
    return max(LEAST_ITL, ITL_READS * cost_model.step_limit(StepShape([1], [1], 1)))


class _TokenCount:
    """Stands in where no cost model is known: a step takes in proportion to its tokens, a millisecond each at first."""

    def step_limit(self, shape: StepShape) -> float:
        return 1e-3 * float(np.sum(shape.num_tokens_R) + np.sum(shape.encoded))


class ItlBound:
    """own: seconds that a step with decoding rows should take at most; None: as long as it likes. target: the least of
    these and of those that requests which run were promised between their tokens. encodes: prompts are inputs of an
    encoder, beside each of which the decoder runs one token."""

    def __init__(self, target: float | None, cost_model: CostModel | None, *, encodes: bool = False) -> None:
        self._encodes = encodes
        self.own = self.target = target
        self._model = cost_model or _TokenCount()
        sums = isinstance(cost_model, SumModel) and cost_model.sums_suffice and not encodes
        self._sums = cost_model if sums and isinstance(cost_model, SumModel) else None
        self._ratio = FIRST_GUESS

    def promise(self, asked: float | None) -> None:
        """Keep to what running requests were promised, too."""
        self.target = min((each for each in (self.own, asked) if each is not None), default=None)

    def prompt_tokens(self, kv_len_R: np.ndarray, start: int, most: int, wanted: int | None = None) -> int:
        """Return the number of prompt tokens that may run beside decoding rows with kv_len_R tokens each; at most
        `most`.

        start: tokens of the first prompt that are cached already: attention to them takes time too.
        wanted: the tokens of all prompts, if they are known. The answer may be less than what the bound allows, but
        not less than these if it allows them.
        """
        target = self.target
        if target is None or most <= LEAST:
            return most
        rows, seconds = len(kv_len_R), self._beside(kv_len_R, start)
        sizes = _sizes(rows, most)
        enough = len(sizes) - 1 if wanted is None else bisect_left(sizes, wanted)
        if enough < len(sizes) - 1 and seconds(sizes[enough] + SPARE) <= target:
            return sizes[enough]
        alone = seconds(0)
        allowed = max(target, DECODE_STEPS * alone) if rows else target
        if (longest := seconds(most)) <= allowed:
            return most
        low, high = 0, len(sizes) - 1  # what fits and what does not
        known, shortest = 0, alone
        while high - low > 1:  # time grows with tokens, and nearly in proportion to them
            share = (allowed - shortest) / max(longest - shortest, 1e-12)
            middle = bisect_right(sizes, known + share * (sizes[high] - known)) - 1
            middle = min(max(middle, low + 1), high - 1)
            if (time := seconds(sizes[middle] + SPARE)) <= allowed:
                low, known, shortest = middle, sizes[middle], time
            else:
                high, longest = middle, time
        return sizes[low]

    def note(self, plan: StepPlan, elapsed: float, limit: float | None = None) -> None:
        """A step took `elapsed` seconds (0: not known). Those with prompt tokens, or encoder inputs, beside decoding
        rows are compared. limit: the least seconds that the cost model gives it, if they are known."""
        rows = plan.rows
        if elapsed <= 0 or (rows.tokens_each and rows.encoded_R is None):
            return
        if not 0 < np.count_nonzero(rows.kinds_R == CHUNK) < len(rows):
            return
        self.learn(elapsed, limit or self._model.step_limit(plan.shape()))

    def learn(self, elapsed: float, limit: float) -> None:
        """Correct the model by a step with a prompt beside decoding rows, which took `elapsed` seconds. Its least are
        `limit`."""
        self._ratio += MEMORY * (min(MOST, elapsed / limit) - self._ratio)

    def _beside(self, kv_len_R: np.ndarray, start: int) -> Callable[[int], float]:
        """Return the function that gives the seconds of a step with so many tokens of a prompt beside these rows."""
        rows = len(kv_len_R)
        if self._sums is not None:
            of_prompt, ratio, keys = self._sums.of_prompt, self._ratio, float(np.add.reduce(kv_len_R))
            return lambda tokens: ratio * of_prompt(rows, keys, tokens, start + tokens)
        tokens_R, length_R = np.ones(rows + 1), np.append(kv_len_R, 0.0)

        def seconds(tokens: int) -> float:
            tokens_R[rows], length_R[rows] = tokens, start + tokens
            count = rows + (tokens > 0)
            shape = StepShape(tokens_R[:count], length_R[:count], count)
            if self._encodes:
                tokens_R[rows] = length_R[rows] = 1
                shape = shape._replace(encoded=[tokens] * (count - rows))
            return self._ratio * self._model.step_limit(shape)

        return seconds


@lru_cache(KEPT_SIZES)
def _sizes(rows: int, most: int) -> tuple[int, ...]:
    """Return the numbers of prompt tokens that may run beside so many rows, in order."""
    return LEAST, *(n - rows for n in whole_steps(rows + LEAST, rows + most)), most


def whole_steps(least: int, most: int) -> list[int]:
    """Return numbers of tokens between `least` and `most` that fill a product's tiles, and so a captured step. Fewer
    than a tile are whole too. One and a half are the step between one tile and two: behind 50,000 tokens attention
    takes most of the time, and half of a second tile is much of what fits."""
    sizes = (*range(least + CLOSE, 128, CLOSE), 128, 192, *range(256, 1024, 128), *range(1024, most, 256))
    return [size for size in sizes if least < size < most]
