"""The pages that running requests will need: the lengths of earlier outputs are used to estimate how long these will
run.

The end of an output is unknown. Known are the outputs that ended before, and those that have not ended yet. The share
of outputs that are longer than n tokens is estimated from both (Kaplan and Meier 1958), over buckets of lengths. An
output that reached its client's limit only shows that it would not have ended earlier. A few outputs of a usual shape
are assumed before any has ended. This gives the probability that a running request still runs after t more tokens; it
then holds blocks for all its tokens. The expected growth is the sum over all requests, at the t (of several) for which
it is largest.
"""

from __future__ import annotations

from collections.abc import Sequence as PySequence

import numpy as np

from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.engine.sequence import Sequence
from ridgeline.engine.slots import SlotTable

EDGES = np.array([0, *(round(16 * 2 ** (n / 2)) for n in range(33))], np.float64)  # of the buckets, in tokens
# Assumed before any output has ended, and soon outweighed: limits up to SURE tokens are reached, as jobs of a fixed
# length do, and longer outputs have USUAL tokens more in the mean
SURE, USUAL = 256, 512
FORGOTTEN = 1 / 256  # share of what is known that is forgotten with every output that ends
MOST_LATELY = 1024  # outputs that ended and are not counted yet
LEAST = 1e-9  # shares below this one are taken for it, so that none is divided by 0
# of each kind, at which the sum is computed. It is highest just before requests reach their limits, so once the best of
# some limits is known, as many more are looked at between its neighbours
MOMENTS = 12
UNDER_WAY = 2  # plans after its last in which a request still holds its blocks


class Outputs:
    """The lengths of outputs. reached: how many came to the end of a bucket or ended in it; ended: in it. Outputs that
    ended lately are counted when they are asked about: where there is memory enough nothing is."""

    def __init__(self) -> None:
        self._reached = np.zeros(len(EDGES) - 1)
        self._ended = np.zeros(len(EDGES) - 1)
        self._lately: list[tuple[int, bool]] = []
        self._assumed = 1 - np.exp(-np.diff(np.maximum(EDGES, SURE)) / USUAL)

    def note(self, length: int, *, cut: bool) -> None:
        """Learn that an output ended after `length` tokens. cut: its limit ended it."""
        self._lately.append((length, cut))
        if len(self._lately) >= MOST_LATELY:
            self._count()

    def _count(self) -> None:
        """Take in the outputs that ended lately, the newest with the most weight."""
        length_N, cut_N = (np.array(each) for each in zip(*self._lately, strict=True))
        self._lately.clear()
        count, size = len(length_N), len(EDGES) - 1
        buckets_N = np.searchsorted(EDGES[:-1], length_N, "right") - 1
        weights_N = (1 - FORGOTTEN) ** np.arange(count - 1, -1, -1.0)
        passed = np.bincount(buckets_N + ~cut_N, weights_N, size + 1)  # buckets to whose ends each one came
        ended = np.bincount(buckets_N, weights_N * ~cut_N, size)
        old = (1 - FORGOTTEN) ** count
        self._reached = self._reached * old + passed[:0:-1].cumsum()[::-1]
        self._ended = self._ended * old + ended

    def longer(self, lengths_R: np.ndarray) -> np.ndarray:
        """Return the share of outputs that are longer than each of EDGES. lengths_R: those of running requests."""
        if self._lately:
            self._count()
        buckets_R = np.searchsorted(EDGES[:-1], lengths_R, "right") - 1
        passed = len(buckets_R) - np.cumsum(np.bincount(buckets_R, minlength=len(EDGES) - 1))
        ends = (self._ended + self._assumed) / (self._reached + passed + 1)
        return np.concatenate([[1.0], np.cumprod(1 - ends)])


class Forecast:
    """The growth of all requests in slots. ahead: positions behind a request's tokens that need blocks too."""

    def __init__(self, layout: CacheLayout, slots: SlotTable, ahead: int) -> None:
        self.outputs = Outputs()
        self._slots, self._ahead, self._block_size = slots, ahead, layout.block_size
        self._most = [
            0 if group.spec.encoded else group.spec.blocks_needed(1 << 30, 1, layout.block_size)
            for group in layout.groups
        ]
        self._pages_each = [1 / layout.blocks_per_page(g) for g in range(len(layout.groups))]

    def growth(self, new: PySequence[Sequence] = (), without: PySequence[Sequence] = (), enough: float = 0.0) -> float:
        """Return by how many pages the running requests will grow, at most and in expectation.

        new: requests that would run as well, and have their hits. without: running ones that would not.
        enough: if all could reach their limits within so many pages, the exact expectation does not matter.
        """
        slots, used_S = self._slots, self._slots.used
        if not without and (most := self.at_limits(new)) < enough:
            return most
        if without:
            used_S = used_S.copy()
            used_S[[seq.slot for seq in without]] = False
        at_R = used_S.nonzero()[0]
        columns = (slots.kv_len, slots.known, slots.prompt, slots.last_kv_len, slots.shared)
        more = np.array([_columns(seq) for seq in new], np.int32).reshape(-1, len(columns)).T
        joined = (np.concatenate([column[at_R], own]) for column, own in zip(columns, more, strict=True))
        return self._growth(enough, *joined) if len(at_R) + len(new) else 0.0

    def at_limits(self, new: PySequence[Sequence]) -> float:
        """Return the pages of all requests at their limits, as if none shared or held any yet: never fewer than they
        can grow by. It takes as long with a thousand requests as with one."""
        tokens, count = self._slots.limits, self._slots.num_used + len(new)
        for seq in new:
            tokens += max(len(seq.tokens), seq.request.max_total_tokens - 1)
        return (tokens + count * (self._ahead + self._block_size)) / self._block_size * sum(self._pages_each)

    def _growth(
        self,
        enough: float,
        now_R: np.ndarray,
        known_R: np.ndarray,
        prompt_R: np.ndarray,
        last_R: np.ndarray,
        shared_R: np.ndarray,
    ) -> float:
        """Return the growth of requests that hold blocks for `now` tokens, will for `known` ones once their prompts
        have run, and for `last` ones if they reach their limits. Shared blocks stay when one of them ends."""
        known_R = np.maximum(known_R, now_R)
        left_R, output_R = np.maximum(last_R - known_R, 0), np.maximum(known_R - prompt_R, 0)
        held = self._pages(now_R).sum()
        if (limit := float(self._pages(known_R + left_R).sum() - held)) <= enough:
            return limit
        longer, shared_R = self.outputs.longer(output_R), self._pages(shared_R)
        there_R = np.maximum(np.interp(output_R, EDGES, longer), LEAST)
        ends_R = left_R + UNDER_WAY

        def sums(after_T: np.ndarray) -> np.ndarray:
            after_T1 = after_T[:, None]
            there_TR = np.interp(after_T1 + output_R, EDGES, longer) / there_R * (after_T1 <= ends_R)
            return (there_TR * (self._pages(known_R + np.minimum(after_T1, left_R)) - shared_R)).sum(1)

        ends = np.unique(ends_R)
        after_T = np.unique(np.concatenate([_some(ends), np.geomspace(1, ends[-1], MOMENTS).astype(np.int64)]))
        sums_T = sums(after_T)
        best = int(sums_T.argmax())
        low, high = after_T[max(best - 1, 0)], after_T[min(best + 1, len(after_T) - 1)]
        highest = max(sums_T[best], sums(_some(ends[(ends >= low) & (ends <= high)])).max(initial=0.0))
        return float(highest + shared_R.sum() - held)

    def _pages(self, tokens: np.ndarray) -> np.ndarray:
        """Return the pages that a request of so many tokens fills."""
        blocks = -(-(tokens + self._ahead) // self._block_size)
        pages = np.minimum(blocks, self._most[0]) * self._pages_each[0]
        for most, each in zip(self._most[1:], self._pages_each[1:], strict=True):
            pages += np.minimum(blocks, most) * each
        return pages


def _columns(seq: Sequence) -> tuple[int, int, int, int, int]:
    """Return the entries that the slot table would have for a request that has its hits."""
    return seq.cached_tokens, len(seq.tokens), seq.num_prompt, seq.request.max_total_tokens - 1, seq.shared_tokens


def _some(ends: np.ndarray) -> np.ndarray:
    """Return at most MOMENTS of these numbers, evenly spread over them."""
    return ends[np.linspace(0, len(ends) - 1, min(MOMENTS, len(ends))).astype(np.intp)]
