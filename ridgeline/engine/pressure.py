"""Decisions where requests need more of the cache than there is: whether one may start, and which are preempted.

A preempted request later resumes with those of its first blocks that the cache still has. All its blocks are kept as
long as other content can be evicted (`BlockPool.await_return`). They are lost to the growth of the requests that keep
running, so three rules keep that small:

* A request starts if the pool will hold all that running requests will need (`forecast.py`). A new one may overbook it
  by some pages, since forecasts err and tokens are cheap to run again. One that was preempted may not: it would soon be
  preempted again. A new one that others may outrank leaves some pages free for these.
* Requests are preempted while some blocks are still free. Another request often ends before these are used up, and
  then nothing is lost at all.
* So many requests are preempted together that the growth of the others uses up little of the blocks that these leave.

A request's way back is the cheaper one of two, by predicted time: its tokens run again, or its blocks come from the
host's memory. Of requests that are equally entitled to go on those are preempted whose way back costs least for each
block that they leave. Before any request is, windows give up what no later token needs, which costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as PySequence
from math import inf, log
from typing import NamedTuple

from ridgeline.engine.cache.manager import CacheManager
from ridgeline.engine.forecast import Forecast
from ridgeline.engine.price import Price
from ridgeline.engine.sequence import Sequence

# Chosen with ridgeline_bench/scripts/preemption.py; docs/scheduling.md has the figures of these values.
OVERBOOKED = (
    0.15  # of the pool. 0 cost equal requests a tenth of their throughput, 0.2 a twentieth at 1.5 times the pool
)
LEFT = 0.05  # of the pool, to those that outrank a request. Without, three times as many of its tokens ran again
SPARE = 0.5  # blocks for each running sequence. Half of all full blocks' worth: 8 steps with blocks of 16 tokens
LOSS = 0.15  # of the blocks of requests that are preempted together, what the others may use up


class WayBack(NamedTuple):
    """The way by which a preempted request has its tokens again. below: from the host's memory; else they run again.
    cost: predicted milliseconds of it, for each block that the request leaves."""

    below: bool
    cost: float


class Pressure:
    """price: of tokens that run again."""

    def __init__(self, cache: CacheManager, forecast: Forecast, price: Price = Price()) -> None:
        self._cache, self._forecast, self._price = cache, forecast, price

    def admits(self, seqs: PySequence[Sequence], num_running: int, *, outranked: bool) -> bool:
        """Return True if a request's sequences, which have their hits, can run beside the others to the end. outranked:
        requests may come that take its place."""
        pool = self._cache.pool
        overbooked = 0.0 if seqs[0].preemptions else -LEFT if outranked else OVERBOOKED
        room = pool.free_pages - self._pages(self._spare(num_running)) + overbooked * pool.num_pages
        if self._forecast.at_limits(seqs) <= room - pool.most_awaited:
            return True
        room -= pool.awaited_pages
        return self._forecast.growth(new=seqs, enough=room) <= room

    def is_high(self, num_running: int) -> bool:
        """Return True if so few blocks are left that a request must be preempted."""
        pool, wanted = self._cache.pool, self._spare(num_running)
        return pool.free_pages < sum(wanted) and not pool.can_take(wanted)

    def victims(self, leaders: PySequence[Sequence]) -> list[Sequence]:
        """Return the running requests to preempt, in that order: the last of `leaders` first.

        leaders: those of all running requests, at least two, in policy order. The first one is never preempted.
        """
        fewest, most = 1, len(leaders) - 1
        while fewest < most:
            count = (fewest + most) // 2
            if self._lose_little(leaders[-count:]):
                most = count
            else:
                fewest = count + 1
        return list(leaders[: -fewest - 1 : -1])

    def way_back(self, seq: Sequence) -> WayBack:
        """Return the cheaper way by which a running request would have its tokens again. Blocks that others held when
        it started stay, so they count for nothing. What is on the bus now will not be there then."""
        size, tier = self._cache.block_size, self._cache.tier
        again = freed = num_bytes = 0.0
        for member in seq.members:
            start, known = min(member.shared_tokens, len(member.tokens)), len(member.tokens)
            again += self._price.prompt(known - start, start) + self._price.prompt(member.encoded)
            for g, (spec, blocks) in enumerate(zip(self._cache.specs, member.blocks, strict=True)):
                own = len(blocks) - max(member.passed[g], start // size)
                blocks_left = max(0.0, min(own, 1 if spec.exact else own if spec.encoded else (known - start) / size))
                freed += blocks_left
                num_bytes += 0 if tier is None else blocks_left * tier.layout.block_bytes[g]
        freed = max(1 / size, freed)
        if tier is None or tier.preempted == "recompute" or not self._cache.names.shares(seq):
            return WayBack(below=False, cost=again / freed)
        load = 1e3 * tier.travel_seconds(num_bytes) if num_bytes <= tier.free_bytes else inf
        if tier.preempted == "swap" or load < again:
            return WayBack(below=True, cost=min(load, again) / freed)
        return WayBack(below=False, cost=again / freed)

    def cost(self, seq: Sequence) -> float:
        """Return the cost of a running request's way back, in steps of a fifth: a smaller difference is less than what
        such predictions are wrong by, and should not overthrow the order in which requests came."""
        cost = self.way_back(seq).cost
        return round(log(cost) / log(1.2)) if cost > 0 else -inf

    def _lose_little(self, victims: PySequence[Sequence]) -> bool:
        members = [member for seq in victims for member in seq.members]
        pool, specs = self._cache.pool, self._cache.specs
        left = self._pages([sum(len(seq.blocks[g]) - seq.passed[g] for seq in members) for g in range(len(specs))])
        return self._forecast.growth(without=members) <= pool.free_pages - pool.awaited_pages + LOSS * left

    def _spare(self, num_running: int) -> list[int]:
        """Return the number of blocks of each group that should be free."""
        return [0 if spec.exact or spec.encoded else int(SPARE * num_running) for spec in self._cache.specs]

    def _pages(self, blocks: PySequence[int]) -> float:
        layout = self._cache.layout
        return sum(count / layout.blocks_per_page(g) for g, count in enumerate(blocks))
