"""Where the time of recent requests went."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

from ridgeline.serving.generation import Run

KEPT = 1000  # requests


class RecentRequests:
    """The newest requests of this face, running and ended, by id."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, tuple[Run, float]] = OrderedDict()

    def note(self, run: Run) -> None:
        """Remember a request that begins."""
        self._runs[run.asked.id] = run, time.time()
        while len(self._runs) > KEPT:
            self._runs.popitem(last=False)

    def find(self, request_id: str) -> dict[str, Any] | None:
        """Its breakdown as JSON has it."""
        found = self._runs.get(request_id)
        return breakdown(found[0], found[1]) if found else None

    def all(self) -> list[dict[str, Any]]:
        """Newest first."""
        return [breakdown(run, created) for run, created in reversed(self._runs.values())]


def breakdown(run: Run, created: float | None = None) -> dict[str, Any]:
    """Seconds of each part of a request's life. host_gaps: between the device's steps while it ran. headroom: what
    the device needed at the least ÷ what it took, over the steps while the request ran (None: not known)."""
    completions = []
    for output, ended in zip(run.result.outputs, run.endings, strict=True):
        entry: dict[str, Any] = {
            "index": output.index,
            "finish_reason": output.finish_reason,
            "output_tokens": len(output.token_ids),
        }
        if ended is not None:
            stats, device = ended.stats, ended.device
            begun, first, done = stats.first_scheduled, stats.first_token, stats.finished
            entry |= {
                "cached_tokens": stats.cached_tokens,
                "preemptions": stats.preemptions,
                "queue": (begun if begun is not None else done) - stats.arrival,
                "prefill": first - begun if first is not None and begun is not None else None,
                "decode": done - first if first is not None else None,
                "total": done - stats.arrival,
                "device": device.elapsed,
                "host_gaps": max(0.0, done - begun - device.elapsed) if begun is not None else None,
                "headroom": device.share,
            }
        completions.append(entry)
    return {
        "id": run.asked.id,
        "created": created,
        "prompt_tokens": len(run.asked.prompt_token_ids),
        "completions": completions,
    }
