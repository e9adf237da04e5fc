"""Models beside each other on the same devices: what each holds, reads, computes and sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.footprint import active_parameters, expert_parameters, parameters
from ridgeline.perf.planner import Deployment, Plan
from ridgeline.perf.roofline import step_ops


class Beside(NamedTuple):
    """One model.

    used: parameters of a token. flops: of a token in a step of one. weights: bytes on a device. sent: bytes that a
    token makes a device send in one pass: to experts and back, or for sums. read: bytes of a decode step, by batch, of
    the model on one device. rates: output tokens per second of all devices, by the requests of all of them; None where
    these are fewer than the groups of devices that bring requests of their own.
    """

    division: str
    parameters: int
    used: int
    flops: float
    weights: float
    kv_per_token: float
    sent: float
    read: tuple[float, ...]
    rates: tuple[float | None, ...]


def beside(deployment: Deployment, batches: Sequence[int]) -> Beside:
    """Return the figures of a deployment's model."""
    plan, groups = Plan(deployment), deployment.division.groups
    return Beside(
        str(deployment.division),
        parameters(deployment.model).total,
        active_parameters(deployment.model),
        _total(deployment, 1)[1],
        plan.weights,
        plan.kv_per_token,
        2 * plan.exchanged + _summed(plan),
        tuple(_total(deployment, batch)[0] for batch in batches),
        tuple(plan.point(batch // groups).tokens_per_second if batch >= groups else None for batch in batches),
    )


def with_model(deployment: Deployment, model: ModelSpec) -> Deployment:
    """Return the deployment of another model on as many devices: what divides experts divides the matrices of a model
    without any."""
    d = deployment.division
    if d.ep > 1 and not expert_parameters(model):
        return replace(deployment, model=model, tp=d.tp * d.groups, ep=1)
    return replace(deployment, model=model)


def _total(deployment: Deployment, batch: int) -> tuple[float, float]:
    """Return the bytes and FLOPs of a decode step of the whole model."""
    shape = StepShape([1] * batch, [deployment.decoding_context] * batch, batch)
    ops = step_ops(deployment.model, shape, dtype=deployment.dtype, kv_dtype=deployment.kv_dtype)
    return sum(op.count * op.cost.bytes for op in ops), sum(op.count * op.cost.flops for op in ops)


def _summed(plan: Plan) -> float:
    """Return the bytes that a device sends for the sums of one token: each is a reduce-scatter and an all-gather."""
    tp, shape = plan.deployment.tp, StepShape([1], [1], 0)
    found = [each for stage in plan.divided.stages for each in plan.divided.sums(stage, shape)]
    return sum(each.times * each.bytes for each in found) * 2 * (tp - 1) / tp
