"""The outcome of a plan from those of its parts, and the load of a model's experts from those of its stages.

Legend:
    R  rows of the plan
    K  tokens that some row may emit, at most
    L  likeliest tokens reported, or mixtures
    E  experts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ridgeline.core.plan.expert_load import ExpertLoad
from ridgeline.core.plan.step import Finish, StepLogprobs, StepPlan, StepResult
from ridgeline.ranks.parts import Part


def merged(plan: StepPlan, parts: Sequence[Part], results: Sequence[StepResult]) -> StepResult:
    """Return a plan's outcome from those of its parts. If a part failed, the plan did."""
    if len(parts) == 1:
        return replace(results[0], plan_id=plan.id)
    for result in results:
        if result.error is not None or result.dropped:
            return replace(result, plan_id=plan.id)
    count, width = len(plan.rows), max(result.tokens_RK.shape[1] for result in results)
    tokens_RK, emitted_R = np.full((count, width), -1, np.int32), np.zeros(count, np.int32)
    finish_R = np.full(count, Finish.NONE, np.int8)
    for part, result in zip(parts, results, strict=True):
        rows_R, ends_R = part.rows_R[part.ends_R], part.ends_R
        tokens_RK[rows_R, : result.tokens_RK.shape[1]] = result.tokens_RK[ends_R]
        emitted_R[rows_R], finish_R[rows_R] = result.emitted_R[ends_R], result.finish_R[ends_R]
    return StepResult(
        plan_id=plan.id,
        tokens_RK=tokens_RK,
        emitted_R=emitted_R,
        finish_R=finish_R,
        logprobs=_logprobs(count, parts, results),
        apart=_by_row(parts, [result.apart for result in results]),
        prompt_logprobs=_by_row(parts, [result.prompt_logprobs for result in results]),
        elapsed=sum(result.elapsed for result in results),
    )


def _logprobs(count: int, parts: Sequence[Part], results: Sequence[StepResult]) -> StepLogprobs | None:
    """Return the log-probabilities of all rows. No worker lets a row emit several tokens yet."""
    if results[0].logprobs is None:
        return None
    fields = []
    for name in ("logprob_R", "rank_R", "top_ids_RL", "top_logprobs_RL"):
        first = getattr(results[0].logprobs, name)
        values = np.zeros((count, *first.shape[1:]), first.dtype)
        for part, result in zip(parts, results, strict=True):
            values[part.rows_R[part.ends_R]] = getattr(result.logprobs, name)[part.ends_R]
        fields.append(values)
    return StepLogprobs(*fields)


def _by_row(parts: Sequence[Part], told: Sequence[Mapping[int, StepLogprobs]]) -> dict[int, StepLogprobs]:
    """Return the log-probabilities that parts tell by row, those of a chunk's pieces one after the other."""
    found: dict[int, list[StepLogprobs]] = {}
    for part, scored in zip(parts, told, strict=True):
        for own, scores in scored.items():
            found.setdefault(int(part.rows_R[own]), []).append(scores)
    return {row: _joined(pieces) for row, pieces in found.items()}


def _joined(pieces: Sequence[StepLogprobs]) -> StepLogprobs:
    names = ("logprob_R", "rank_R", "top_ids_RL", "top_logprobs_RL")
    return StepLogprobs(*(np.concatenate([getattr(piece, name) for piece in pieces]) for name in names))


def of_stages(loads: Sequence[ExpertLoad | None]) -> ExpertLoad | None:
    """Return the load of a model's experts from those of its stages, each with its own mixtures or none."""
    own = [load for load in loads if load is not None and load.layers]
    if len(own) < 2:
        return own[0] if own else next((load for load in loads if load is not None), None)
    weights = [len(load.layers) for load in own]
    return ExpertLoad(
        layers=tuple(layer for load in own for layer in load.layers),
        experts=tuple(count for load in own for count in load.experts),
        total_LE=_below_each_other([load.total_LE for load in own]),
        step_LE=_below_each_other([load.step_LE for load in own]),
        step_tokens=max(load.step_tokens for load in own),
        reach=float(np.average([load.reach for load in own], weights=weights)),
    )


def of_parts(loads: Sequence[ExpertLoad]) -> ExpertLoad:
    """Return the load of a stage's experts in a plan from those in its parts that were looked at."""
    tokens = sum(load.step_tokens for load in loads)
    return loads[-1]._replace(
        step_LE=np.sum([load.step_LE for load in loads], 0),
        step_tokens=tokens,
        reach=float(np.mean([load.reach for load in loads])),
    )


def _below_each_other(blocks: Sequence[np.ndarray]) -> np.ndarray:
    width = max(block.shape[1] for block in blocks)
    return np.concatenate([np.pad(block, ((0, 0), (0, width - block.shape[1]))) for block in blocks])
