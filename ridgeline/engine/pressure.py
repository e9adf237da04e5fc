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
"""

from __future__ import annotations

from collections.abc import Sequence as PySequence

from ridgeline.engine.cache.manager import CacheManager
from ridgeline.engine.forecast import Forecast
from ridgeline.engine.sequence import Sequence

# Chosen with ridgeline_bench/scripts/preemption.py; docs/scheduling.md has the figures of these values.
OVERBOOKED = (
    0.15  # of the pool. 0 cost equal requests a tenth of their throughput, 0.2 a twentieth at 1.5 times the pool
)
LEFT = 0.05  # of the pool, to those that outrank a request. Without, three times as many of its tokens ran again
SPARE = 0.5  # blocks for each running sequence. Half of all full blocks' worth: 8 steps with blocks of 16 tokens
LOSS = 0.15  # of the blocks of requests that are preempted together, what the others may use up


class Pressure:
    def __init__(self, cache: CacheManager, forecast: Forecast) -> None:
        self._cache, self._forecast = cache, forecast

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
