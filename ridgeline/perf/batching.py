"""Static batches beside continuous ones: what waiting for the longest answer costs.

Lengths of answers are uniform from 1 to M. A static batch of B requests runs until its longest answer ends, after

    E[max] = sum over k = 1 .. M of 1 - ((k - 1) / M)^B

steps on average, and rows that have ended go on as padding. So of its rows' steps only E[length] / E[max] bring a
token: nearly a half for many rows, whatever the hardware. It must also keep room for the longest answer in each row. A
continuous batch replaces a row as soon as it ends (Orca, OSDI 2022).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ridgeline.perf.planner import Plan


class Batched(NamedTuple):
    """One batch size, both ways. useful: the share of a static batch's row steps that bring a token.

    static, continuous: output tokens per second.
    """

    batch: int
    steps: float
    useful: float
    static: float
    continuous: float

    @property
    def gain(self) -> float:
        return self.continuous / self.static


def longest_of(batch: int, longest: int) -> float:
    """Return the expected largest of `batch` lengths that are uniform from 1 to `longest`."""
    return float(longest - ((np.arange(longest) / longest) ** batch).sum())


def static_room(plan: Plan) -> int:
    """Return the number of requests that fit if each has room for the longest answer."""
    d = plan.deployment
    whole = plan.divided.kv_per_request(
        plan.stage,
        d.cached(d.prompted + longest_answer(plan)),
        block_size=d.block_size,
        max_chunk=plan.crossover or d.input,
        encoded=d.encoded,
    )
    return int(max(0.0, plan.kv_budget) // whole)


def longest_answer(plan: Plan) -> int:
    """Return the longest of answers that are uniform from 1 on and as long as planned on average."""
    return 2 * plan.deployment.output - 1


def batched(plan: Plan) -> list[Batched]:
    """Return both ways at the batches of the plan's points; a static one can be larger than its room allows, to show
    what that room costs."""
    d, divided, found = plan.deployment, plan.divided, []
    for point in plan.points():
        steps = longest_of(point.batch, longest_answer(plan))
        step = divided.decode(point.batch, d.cached(d.prompted + int(steps) // 2), d.encoded).total
        cycle = point.batch * divided.busy(d.input) + max(0.0, steps - 1) * step
        rate = d.division.groups * point.batch * d.output / cycle
        found.append(Batched(point.batch, steps, d.output / steps, rate, point.tokens_per_second))
    return found
