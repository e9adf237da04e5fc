"""The bound on the inter-token latency (ITL): how many prompt tokens a step may run beside requests that decode.

Requests that decode wait for the whole step, and a prompt of 16,384 tokens makes a step of a few milliseconds last half
a second. The cost model gives the least time of a step. The measured times of steps, divided by that, correct it.

If many requests decode, a tight bound would starve prompts: each step would read all keys of the decoding rows for a
few prompt tokens. So a step may always last `DECODE_STEPS` times as long as its decoding rows alone.
"""

from __future__ import annotations

import numpy as np

from ridgeline.core.plan.step import RowKind, StepPlan
from ridgeline.kernels.base.cost import CostModel, StepShape

DECODE_STEPS = 3  # at this many, the balance of prompts and decodes of a server at its limit is not disturbed
LEAST = 64  # prompt tokens that every step may run
CLOSE = 16  # tokens between what fits and what does not, at which the search for their number ends
FIRST_GUESS = 1.3  # time of a mixed step divided by its limit, before any was measured (8B on an H200: 1.25 to 1.4)
MOST = 100.0  # of that ratio: a machine that was suspended for an hour says nothing about steps
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
        self._ratio = FIRST_GUESS

    def promise(self, asked: float | None) -> None:
        """Keep to what running requests were promised, too."""
        self.target = min((each for each in (self.own, asked) if each is not None), default=None)

    def prompt_tokens(self, kv_len_R: np.ndarray, start: int, most: int) -> int:
        """Return the number of prompt tokens that may run beside decoding rows with kv_len_R tokens each; at most
        `most`.

        start: tokens of the first prompt that are cached already: attention to them takes time too.
        """
        target = self.target
        if target is None or most <= LEAST:
            return most
        rows = len(kv_len_R)
        allowed = max(target, DECODE_STEPS * self._seconds(kv_len_R, start, 0)) if rows else target
        if self._seconds(kv_len_R, start, most) <= allowed:
            return most
        low, high = LEAST, most
        while high - low > CLOSE:  # time grows with tokens
            middle = (low + high) // 2
            low, high = (middle, high) if self._seconds(kv_len_R, start, middle) <= allowed else (low, middle)
        return min(most, max(LEAST, whole_tiles(rows + low) - rows))

    def note(self, plan: StepPlan, elapsed: float) -> None:
        """A step took `elapsed` seconds (0: not known). Those with prompt tokens, or encoder inputs, beside decoding
        rows are compared."""
        rows = plan.rows
        if elapsed <= 0 or (rows.tokens_each and rows.encoded_R is None):
            return
        if not rows.kinds_R.min() < rows.kinds_R.max() == RowKind.CHUNK:
            return
        limit = self._model.step_limit(plan.shape())
        self._ratio += MEMORY * (min(MOST, elapsed / limit) - self._ratio)

    def _seconds(self, kv_len_R: np.ndarray, start: int, tokens: int) -> float:
        count, rows = int(tokens > 0), len(kv_len_R)
        if self._encodes:
            one = np.ones(rows + count)
            shape = StepShape(one, np.append(kv_len_R, [1] * count), rows + count, encoded=[tokens] * count)
            return self._ratio * self._model.step_limit(shape)
        num_tokens_R = np.append(np.ones(rows), [tokens] * count)
        shape = StepShape(num_tokens_R, np.append(kv_len_R, [start + tokens] * count), rows + count)
        return self._ratio * self._model.step_limit(shape)


def whole_tiles(tokens: int) -> int:
    """The most tokens up to `tokens` that fill a product's tiles, and so a captured step."""
    size = 128 if tokens < 1024 else 256
    return tokens // size * size if tokens >= size else tokens
