"""The figures of several engines as those of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec.structs import replace

from ridgeline.transport.messages import Distribution, ExpertFigures, Stats

KEPT_STEPS = 1024  # as many as one engine tells
BALANCE = ("rebalanced: before", "rebalanced: after")  # ratios: the worst engine's


def summed(told: Sequence[tuple[Stats, bool]]) -> Stats:
    """Return the sum of the engines' newest figures, each with whether it still lives. A dead engine runs nothing,
    whatever it said last.

    `started` changes whenever an engine was replaced, because its counters begin again then.
    """
    figures = [stats for stats, _ in told]
    living = [stats for stats, lives in told if lives]
    steps = sorted((step for stats in figures for step in stats.recent), key=lambda step: step.at)
    return Stats(
        at=max(stats.at for stats in figures),
        started=max(stats.started for stats in figures),
        running=sum(stats.running for stats in living),
        waiting=sum(stats.waiting for stats in living),
        pages_used=sum(stats.pages_used for stats in living),
        num_pages=sum(stats.num_pages for stats in figures),
        steps=sum(stats.steps for stats in figures),
        step_seconds=sum(stats.step_seconds for stats in figures),
        limit_seconds=sum(stats.limit_seconds for stats in figures),
        counters=_added(stats.counters for stats in figures) | _worst(stats.counters for stats in figures),
        finished={name: int(count) for name, count in _added(stats.finished for stats in figures).items()},
        histograms={name: _together([stats.histograms[name] for stats in figures]) for name in figures[0].histograms},
        recent=steps[-KEPT_STEPS:],
        gpus=[gpu for stats in living for gpu in stats.gpus],
        experts=_experts([stats.experts for stats in figures if stats.experts is not None]),
        saturations=sum(stats.saturations for stats in figures),
        paused=bool(living) and all(stats.paused for stats in living),
        asleep=min((stats.asleep for stats in living), default=0),
    )


def _added(each: Iterable[dict[str, float]] | Iterable[dict[str, int]]) -> dict[str, float]:
    total = Counter[str]()
    for counts in each:
        total.update(counts)
    return dict(total)


def _worst(each: Iterable[dict[str, float]]) -> dict[str, float]:
    told = [counters for counters in each if BALANCE[0] in counters]
    return {name: max(counters[name] for counters in told) for name in BALANCE} if told else {}


def _together(each: Sequence[Distribution]) -> Distribution:
    counts = [sum(bucket) for bucket in zip(*(one.counts for one in each), strict=True)]
    return Distribution(counts=counts, total=sum(one.total for one in each))


def _experts(each: Sequence[ExpertFigures]) -> ExpertFigures | None:
    if not each:
        return None
    tokens = sum(np.frombuffer(one.tokens, np.int64) for one in each)
    reached = [max(layer) for layer in zip(*(one.reached for one in each), strict=True)]
    return replace(each[0], tokens=np.asarray(tokens, np.int64).tobytes(), reached=reached)
