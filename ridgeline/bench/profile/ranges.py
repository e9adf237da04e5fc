"""Names for the parts of a step, laid over a running engine while it is profiled and taken off afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ridgeline.bench.profile.ops import step_name
from ridgeline.core.cost import StepShape
from ridgeline.core.plan import StepPlan
from ridgeline.engine.engine import Engine
from ridgeline.kernels.ops import OPS
from ridgeline.worker.local import LocalWorker

HOST, SEGMENT, LAYER, OP = "engine ", "segment ", "layer ", "op "  # prefixes of the names of ranges


@contextmanager
def named_ranges(engine: Engine, worker: LocalWorker) -> Iterator[list[StepShape]]:
    """Ranges for the engine's calls, the two segments, every layer and op, in torch's profiler and (CUDA) as NVTX.

    Yields the shapes of the steps that run meanwhile. Graphs are not replayed meanwhile: their ops have no names.
    """
    shapes: list[StepShape] = []
    runner = worker.runner
    cuda = runner.device.type == "cuda"
    with ExitStack() as undo:
        for owner, name, label in (
            (engine.scheduler, "schedule", HOST + "schedule"),
            (engine.scheduler, "update", HOST + "update"),
            (worker, "submit", HOST + "submit"),
            (worker, "collect", HOST + "collect"),
            (runner, "forward", SEGMENT + "forward"),
            (runner, "sample", SEGMENT + "sample"),
        ):
            _replace(undo, owner, name, _ranged(getattr(owner, name), label, cuda))
        _replace(undo, runner, "_graphs", None)
        _replace(undo, runner, "forward", _noting(runner.forward, shapes))
        for index, layer in enumerate(runner.decoder.layers):
            _replace(undo, layer, "forward", _ranged(layer.forward, f"{LAYER}{index}", cuda))
        weights = {id(parameter): name for name, parameter in runner.decoder.named_parameters()}
        for op in OPS:
            _replace(undo, runner.decoder.ops, op, _ranged_op(getattr(runner.decoder.ops, op), op, weights))
        yield shapes


def _replace(undo: ExitStack, owner: object, name: str, value: object) -> None:
    """Set an attribute of one object and have it restored."""
    own = vars(owner)
    if name in own:
        undo.callback(setattr, owner, name, own[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def _ranged(function: Callable[..., Any], label: str, cuda: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with torch.profiler.record_function(label):
            if not cuda:
                return function(*arguments, **options)
            with torch.cuda.nvtx.range(label):
                return function(*arguments, **options)

    return call


def _ranged_op(function: Callable[..., Any], op: str, weights: dict[int, str]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        with torch.profiler.record_function(OP + step_name(op, arguments, weights)):
            return function(*arguments, **options)

    return call


def _noting(forward: Callable[..., Any], shapes: list[StepShape]) -> Callable[..., Any]:
    def call(plan: StepPlan) -> Any:
        rows = plan.rows
        shapes.append(StepShape(rows.num_tokens_R, plan.kv_bound_R, int((rows.num_logits_R > 0).sum())))
        return forward(plan)

    return call
