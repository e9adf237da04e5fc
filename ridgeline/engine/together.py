"""Tokens that see each other both ways, and so run in one step: those of a picture, or of a whole prompt."""

from __future__ import annotations

from ridgeline.core.plan.request import Request
from ridgeline.core.specs.model import BothWays
from ridgeline.engine.plan_builder import PlanBuilder

Run = tuple[int, int]  # the first of such tokens, and their end


def runs_of(request: Request, both_ways: BothWays | None) -> tuple[Run, ...]:
    """Return the runs of a prompt's tokens that see each other both ways."""
    if both_ways is None:
        return ()
    if both_ways == "prompt":
        return ((0, len(request.prompt_token_ids)),)
    return tuple((each.start, each.end) for each in request.inserted)


def uncut(runs: tuple[Run, ...], start: int, stop: int, builder: PlanBuilder) -> int:
    """Return the end of a chunk of the tokens from `start` to about `stop` that cuts no run: it lies before the run, or
    behind it if the chunk begins there. A run that does not fit the step's budget waits for a step without other
    prompts, and then makes that larger. A chunk may begin inside of a run, of which the cache then holds the rest."""
    for first, end in runs:
        if not first < stop < end:
            continue
        if first > start:
            return first
        room = builder.budget if builder.chunks else builder.room
        return end if end - start <= room else start
    return stop


def parts(runs: tuple[Run, ...], start: int, end: int) -> tuple[Run, ...]:
    """Return the parts of runs among the tokens of a chunk, counted from its first one."""
    return tuple((max(first, start) - start, last - start) for first, last in runs if first < end and start < last)
