"""An engine's figures that are known by heart."""

from __future__ import annotations

from ridgeline.serving.observed.histograms import BOUNDS
from ridgeline.serving.observed.past import COUNTERS, HISTOGRAMS
from ridgeline.transport.messages import Distribution, Stats


def stats(at: float, tokens: int = 0, *, started: float = 1.7e9, running: int = 0, first: int = 0) -> Stats:
    """Those of an engine that has written so many tokens, and `first` first ones of 15 ms."""
    counts = {name: [0] * (len(BOUNDS[name]) + 1) for name in HISTOGRAMS}
    counts[HISTOGRAMS[0]][4] = first
    return Stats(
        at=at,
        started=started,
        running=running,
        waiting=2 * running,
        pages_used=running,
        num_pages=100,
        steps=tokens,
        step_seconds=tokens / 64,
        limit_seconds=tokens / 128,
        counters=dict.fromkeys(COUNTERS, 0) | {"generation_tokens": tokens},
        finished={},
        histograms={name: Distribution(counts=counts[name], total=0.0) for name in HISTOGRAMS},
        recent=[],
        gpus=[],
    )
