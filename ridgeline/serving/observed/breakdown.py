"""The parts of a request's life in seconds, as JSON has them.

`queue`, `prefill` and `decode` follow each other and add up to `total`; prefill ends with the first token. `device` is
the time that the device worked, for this request and those beside it, since this one was first scheduled, and
`host_gaps` is the rest of that time. `headroom` is the least time that the device needed ÷ the time it took (None if
not known). `preempted_for` counts how often the request started over, by reason (`core.plan.request.Preemption`). All
figures of a running request are those so far.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from ridgeline.core.plan.request import RequestStats
from ridgeline.kernels.base.cost import Headroom
from ridgeline.serving.generation.service import Run
from ridgeline.transport.messages import Life

SHORTEST = 1e-9  # seconds that a rate is divided by at least


def breakdown(run: Run) -> dict[str, Any]:
    """Return the breakdown of a request that this API server ran. A completion that was given up has no figures."""
    completions = []
    for index, (output, ended) in enumerate(zip(run.drawn, run.endings, strict=True)):
        known = figures(ended.stats, ended.device) if ended is not None else {}
        ends = {"index": index, "finish_reason": output.finish_reason, "output_tokens": len(output.token_ids)}
        completions.append(known | ends)
    return {"id": run.asked.id, "prompt_tokens": len(run.asked.prompt_token_ids), "completions": completions}


def breakdowns(lives: list[Life]) -> list[dict[str, Any]]:
    """Return the breakdowns of requests that the engine reported, in its order. `finish_reason` is None while a
    completion runs."""
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


def vllm_metrics(run: Run) -> dict[str, float]:
    """Return the times of a request's one completion in milliseconds, under vLLM's names. Those of the first token and
    of generating begin where the one before ends. One that was given up has none."""
    [ended] = run.endings
    if ended is None or ended.stats.first_scheduled is None or ended.stats.first_token is None:
        return {}
    stats, begun, first = ended.stats, ended.stats.first_scheduled, ended.stats.first_token
    found = {
        "queue_time_ms": 1000 * (begun - stats.arrival),
        "time_to_first_token_ms": 1000 * (first - begun),
        "generation_time_ms": 1000 * (stats.finished - first),
        "tokens_per_second": stats.output_tokens / max(stats.finished - begun, SHORTEST),
    }
    if stats.output_tokens > 1:
        found["mean_itl_ms"] = found["generation_time_ms"] / (stats.output_tokens - 1)
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
