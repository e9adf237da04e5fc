"""Seconds of each part of a request's life, as JSON has them.

queue, prefill and decode follow each other and are `total` together; prefill ends with the first token. device: that
the device worked, for this request and those beside it, since this one was first scheduled; host_gaps: that it did
not. headroom: what the device needed at the least ÷ what it took (None: not known). preempted_for: how often it started
over, by why (`core.request.Preemption`). Of a request that runs, so far.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from ridgeline.core.cost import Headroom
from ridgeline.core.request import RequestStats
from ridgeline.serving.generation.service import Run
from ridgeline.transport.messages import Life


def breakdown(run: Run) -> dict[str, Any]:
    """Of a request that this API server ran; a completion that was given up has no figures."""
    completions = []
    for index, (output, ended) in enumerate(zip(run.drawn, run.endings, strict=True)):
        known = figures(ended.stats, ended.device) if ended is not None else {}
        ends = {"index": index, "finish_reason": output.finish_reason, "output_tokens": len(output.token_ids)}
        completions.append(known | ends)
    return {"id": run.asked.id, "prompt_tokens": len(run.asked.prompt_token_ids), "completions": completions}


def breakdowns(lives: list[Life]) -> list[dict[str, Any]]:
    """Of requests that the engine told of, in its order. finish_reason: None while a completion runs."""
    found = []
    for name, group in groupby(lives, lambda life: life.name):
        together = list(group)
        completions = [
            {"index": life.index, "finish_reason": life.finish_reason} | figures(life.stats, life.device)
            for life in together
        ]
        first = together[0]
        found.append(
            {
                "id": name,
                "created": first.created,
                "prompt_tokens": first.stats.prompt_tokens,
                "completions": completions,
            }
        )
    return found


def figures(stats: RequestStats, device: Headroom) -> dict[str, Any]:
    begun, first, done = stats.first_scheduled, stats.first_token, stats.finished
    return {
        "output_tokens": stats.output_tokens,
        "cached_tokens": stats.cached_tokens,
        "preemptions": stats.preemptions,
        "preempted_for": dict(stats.preempted_for),
        "queue": (begun if begun is not None else done) - stats.arrival,
        "prefill": (first if first is not None else done) - begun if begun is not None else None,
        "decode": done - first if first is not None else None,
        "total": done - stats.arrival,
        "device": device.elapsed,
        "host_gaps": max(0.0, done - begun - device.elapsed) if begun is not None else None,
        "headroom": device.share,
    }
