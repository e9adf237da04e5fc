"""A step op by op: what each op needs, what limits it, and how long it was measured to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.base.cost import Cost, StepShape
from ridgeline.perf.bottleneck import bottleneck
from ridgeline.perf.division import Collective
from ridgeline.perf.hardware import Hardware
from ridgeline.perf.parts import Reach
from ridgeline.perf.precision import Precision, precision
from ridgeline.perf.roofline import bound, op_rate, seconds, step_ops

JOINT = " + "  # between the names of ops that run as one


@dataclass(frozen=True, kw_only=True)
class ExplainRow:
    """All calls of one op in a step.

    bound: a class of `perf.bottleneck` or, for what devices send each other, "link".
    limit: the least time, in seconds.
    share: the op's share of the step's limit.
    measured: the measured time in seconds; None: not known.
    """

    name: str
    count: int
    bytes: float
    flops: float
    bound: str
    limit: float
    share: float
    measured: float | None = None

    @property
    def intensity(self) -> float:
        return Cost(self.bytes, self.flops).intensity

    @property
    def attained(self) -> float | None:
        """Limit ÷ measured, or None."""
        return self.limit / self.measured if self.measured else None


class Ran(NamedTuple):
    """The way a step ran. measured: op name → seconds of one call. eager: the host launches each op, and no graph
    replays them."""

    measured: Mapping[str, float] | None = None
    eager: bool = False


def explain_table(
    model: ModelSpec,
    shape: StepShape,
    hardware: Hardware,
    ran: Ran = Ran(),
    *,
    dtype: str | Precision = "bfloat16",
    kv_dtype: str | None = None,
    collectives: Sequence[Collective] = (),
    groups: int = 1,
) -> list[ExplainRow]:
    """Return one row per op name, in order, then their "total".

    collectives: what devices that divide the model send each other. groups: `Division.groups`.

    Ops that run fused (and are measured under their joined names) make one row, whose limit is what the parts need. The
    total has a measured time only if every op has one.
    """
    measured, eager = ran.measured, ran.eager or hardware.eager
    p, merged = precision(dtype), dict[str, list[tuple[Cost, float, int]]]()
    fused = {part: joint for joint in measured or () for part in joint.split(JOINT)}
    for op in step_ops(model, shape, dtype=dtype, kv_dtype=kv_dtype, expert_devices=groups):
        limit = seconds(op.cost, hardware, op_rate(op.name, hardware, p))
        merged.setdefault(fused.get(op.name, op.name), []).append((op.cost, limit, op.count))
    whole = sum(limit * count for calls in merged.values() for _, limit, count in calls)
    whole += sum(each.times * each.seconds for each in collectives)
    rows = []
    for name, calls in merged.items():
        count = sum(times for _, _, times in calls) // (name.count(JOINT) + 1)
        cost = _sum([Cost(c.bytes * times, c.flops * times) for c, _, times in calls])
        limit = sum(limit * times for _, limit, times in calls)
        one = (measured or {}).get(name)
        roof = bound(cost, hardware, max(op_rate(part, hardware, p) for part in name.split(JOINT)))
        rows.append(
            ExplainRow(
                name=name,
                count=count,
                bytes=cost.bytes,
                flops=cost.flops,
                bound=bottleneck(limit / count, roof, hardware.floors, eager=eager, measured=one),
                limit=limit,
                share=limit / whole if whole else 0.0,
                measured=None if one is None else one * count,
            )
        )
    rows += [_sent(each, whole, (measured or {}).get(each.op)) for each in collectives]
    return [*rows, _total(rows, whole, hardware.floors.of(eager=eager)[1])]


def _sent(each: Collective, whole: float, one: float | None) -> ExplainRow:
    limit = each.times * each.seconds
    return ExplainRow(
        name=each.op,
        count=each.times,
        bytes=each.times * each.bytes,
        flops=0.0,
        bound="link",
        limit=limit,
        share=limit / whole,
        measured=None if one is None else one * each.times,
    )


def _total(rows: Sequence[ExplainRow], whole: float, floor: float) -> ExplainRow:
    """Return the sum of all rows. It is bound by the class that takes the most time, with no call below its floor."""
    cost = _sum([Cost(row.bytes, row.flops) for row in rows])
    bounds: dict[str, float] = {}
    for row in rows:
        bounds[row.bound] = bounds.get(row.bound, 0.0) + max(row.limit, row.count * floor, row.measured or 0.0)
    times = [row.measured for row in rows if row.measured is not None]
    return ExplainRow(
        name="total",
        count=sum(row.count for row in rows),
        bytes=cost.bytes,
        flops=cost.flops,
        bound=max(bounds, key=lambda name: bounds[name]),
        limit=whole,
        share=1.0,
        measured=sum(times) if len(times) == len(rows) else None,
    )


def _sum(costs: Sequence[Cost]) -> Cost:
    return Cost(sum(c.bytes for c in costs), sum(c.flops for c in costs))


def step_shape(
    batch: int, context: int, prefill: int = 0, *, encodes: bool = False, views: Sequence[int] = ()
) -> StepShape:
    """Return the shape of a step of `batch` decoding rows, with `context` tokens cached after it, beside a prompt of
    `prefill` tokens. encodes: an encoder reads the prompt, and other rows attend to inputs of `context` tokens. views:
    as in `StepShape`.

    Raises InvalidConfig if there is nothing to run.
    """
    if batch < 0 or prefill < 0 or batch + prefill == 0 or (batch and context < 1):
        raise InvalidConfig(
            f"a step of {batch} decoding rows at context {context} and a prompt of {prefill} tokens runs nothing; "
            "give a batch and a context of at least 1, or a prompt."
        )
    extra = [prefill] if prefill else []
    if encodes and prefill:
        cached = [context] * batch
        return StepShape([1] * (batch + 1), [*cached, 1], batch + 1, encoded=extra, crossed_R=[*cached, prefill])
    cached = [context] * batch + extra
    return StepShape([1] * batch + extra, cached, batch + len(extra), views=views)


def reached_experts(model: ModelSpec, shape: StepShape) -> list[tuple[float, int]]:
    """Return (how many experts of a layer have tokens, how many it has) for every kind of mixture in the model."""
    mixtures = dict.fromkeys(
        layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, ExpertsSpec)
    )
    tokens = float(np.sum(shape.num_tokens_R))
    return [(Reach(shape.reach).experts(tokens, spec), spec.routing.experts) for spec in mixtures]


def with_reached(model: ModelSpec, shape: StepShape, reached: float | None) -> StepShape:
    """Return the step if so many experts of a layer had tokens (None: as many as uniform routing reaches).

    Raises InvalidConfig for a model without experts, or for more experts than there are.
    """
    if reached is None:
        return shape
    uniform = reached_experts(model, shape)
    if not uniform or not 0 < reached <= uniform[0][1]:
        limit = f"from 1 to {uniform[0][1]}" if uniform else "left out: the model has no experts"
        raise InvalidConfig(f"the number of experts that have tokens is {reached:g}; it must be {limit}.")
    return shape._replace(reach=reached / uniform[0][0])
