"""Where the time of recent requests went."""

from __future__ import annotations

import time
from collections import OrderedDict
from itertools import islice
from typing import Any

from ridgeline.serving.generation import Run

KEPT = 1000  # requests


class RecentRequests:
    """The newest requests of this face, running and ended, by id. Of those that ended only the breakdown is kept."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, dict[str, Any] | tuple[Run, float]] = OrderedDict()
        self._running: dict[str, tuple[Run, float]] = {}

    def note(self, run: Run) -> None:
        """Remember a request that begins."""
        self._let_go()
        entry = run, time.time()
        self._entries[run.asked.id] = self._running[run.asked.id] = entry
        self._entries.move_to_end(run.asked.id)
        while len(self._entries) > KEPT:
            self._running.pop(self._entries.popitem(last=False)[0], None)

    def find(self, request_id: str) -> dict[str, Any] | None:
        """Its breakdown as JSON has it."""
        entry = self._entries.get(request_id)
        return _shown(entry) if entry is not None else None

    def newest(self, limit: int = KEPT) -> list[dict[str, Any]]:
        """Newest first."""
        return [_shown(entry) for entry in islice(reversed(self._entries.values()), limit)]

    def _let_go(self) -> None:
        """Of requests that ended, whose prompts and outputs would fill the memory."""
        for name, (run, created) in [*self._running.items()]:
            if _over(run):
                self._entries[name] = breakdown(run, created)
                del self._running[name]


def _shown(entry: dict[str, Any] | tuple[Run, float]) -> dict[str, Any]:
    return entry if isinstance(entry, dict) else breakdown(*entry)


def _over(run: Run) -> bool:
    """Nothing more will be known of it: of what its client gave up the engine tells nothing."""
    outputs = run.result.outputs
    return all(output.finished for output in outputs) and (
        None not in run.endings or any(output.finish_reason == "abort" for output in outputs)
    )


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
