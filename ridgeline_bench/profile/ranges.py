"""Names for the parts of a step, put on a running engine while it is profiled and removed afterwards.

Legend:
    R  rows
    T  tokens of the step
    I  inputs of a linear map
    O  outputs of a linear map
    M  model width
    E  experts
    K  experts of a token
    P  pairs of a token and one of its experts
    F  an expert's inner width
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.core.plan.step import StepPlan
from ridgeline.core.plan.worker import Worker
from ridgeline.engine.engine import Engine
from ridgeline.kernels.base.cost import StepShape
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.gemm.route.op import Routes
from ridgeline.kernels.ops import OPS
from ridgeline.layers.experts import ExpertStack
from ridgeline.layers.linear import Linear
from ridgeline.perf.explain import JOINT
from ridgeline.quantization.experts import ExpertWeights
from ridgeline.quantization.weight import Weight
from ridgeline.worker.local import LocalWorker
from ridgeline_bench.profile.ops import module_name, step_name

HOST, SEGMENT, LAYER, OP = "engine ", "segment ", "layer ", "op "  # prefixes of the names of ranges


@contextmanager
def named_ranges(engine: Engine, worker: LocalWorker) -> Iterator[list[StepShape]]:
    """Put ranges around the engine's calls, the two segments, every layer and op, in torch's profiler and (CUDA) as
    NVTX.

    Yield the shapes of the steps that run meanwhile. Graphs are not replayed meanwhile, because their ops have no
    names.
    """
    shapes: list[StepShape] = []
    runner = worker.runner
    cuda = runner.device.type == "cuda"
    with ExitStack() as undo:
        undo.enter_context(host_ranges(engine, worker, cuda=cuda))
        for name in ("forward", "sample"):
            _replace(undo, runner, name, _ranged(getattr(runner, name), SEGMENT + name, cuda))
        _replace(undo, runner.launch, "graphs", None)
        _replace(undo, runner, "forward", _noting(runner.forward, engine, shapes))
        for index, layer in enumerate(runner.decoder.layers):
            _replace(undo, layer, "forward", _ranged(layer.forward, f"{LAYER}{index}", cuda))
        named = _OpRanges({id(parameter): name for name, parameter in runner.decoder.named_parameters()})
        for op in OPS:
            _replace(undo, runner.decoder.ops, op, named.op(getattr(runner.decoder.ops, op), op))
        for name, module in runner.decoder.named_modules():
            if isinstance(module, Linear):
                _replace(undo, module, "matrix", _NamedWeight(module.matrix, module_name(name), named))
            if isinstance(module, ExpertStack):
                _replace(undo, module, "matrices", _NamedExperts(module.matrices, named))
        yield shapes


@contextmanager
def host_ranges(engine: Engine, worker: Worker, *, cuda: bool) -> Iterator[None]:
    """Put ranges around the engine's calls alone, in torch's profiler and (cuda) as NVTX."""
    with ExitStack() as undo:
        for owner, name in (
            (engine.scheduler, "schedule"),
            (engine.scheduler, "update"),
            (worker, "submit"),
            (worker, "collect"),
        ):
            _replace(undo, owner, name, _ranged(getattr(owner, name), HOST + name, cuda))
        yield


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


class _OpRanges:
    """Ranges for ops by their names in the cost model. An op that another op calls is a part of that one.

    `weights` maps the id of a decoder's parameter to its name.
    """

    def __init__(self, weights: dict[int, str]) -> None:
        self.weights = weights
        self._inside = False

    def op(self, function: Callable[..., Any], op: str) -> Callable[..., Any]:
        """Return `function` with a range around every call."""

        def call(*arguments: Any, **options: Any) -> Any:
            with self.around(lambda: step_name(op, arguments, self.weights)):
                return function(*arguments, **options)

        return call

    @contextmanager
    def around(self, name: Callable[[], str]) -> Iterator[None]:
        """Put a range of that name around the block, unless there is one already."""
        if self._inside:
            yield
            return
        self._inside = True
        try:
            with torch.profiler.record_function(OP + name()):
                yield
        finally:
            self._inside = False


@dataclass(frozen=True)
class _NamedWeight(Weight):
    """A linear map's weight, in whatever form, whose products are ranges under the map's name."""

    weight: Weight
    name: str
    ranges: _OpRanges

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def stored(self) -> Tensor:
        return self.weight.stored

    def linear(self, x_TI: Tensor | Rounded, bias_O: Tensor | None) -> Tensor:
        with self.ranges.around(lambda: self.name):
            return self.weight.linear(x_TI, bias_O)

    def norm_linear(self, x: Operand, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
        norm = self.ranges.weights[id(x.norm_weight_I)].split(".")[-2]
        named = [norm, self.name, *(["gated_activation"] if epilogue.gate else [])]
        with self.ranges.around(lambda: JOINT.join(named)):
            return self.weight.norm_linear(x, epilogue)

    @property
    def takes_rounded(self) -> bool:
        return self.weight.takes_rounded

    def buffer(self, tokens: int, dtype: torch.dtype) -> Rounded | None:
        return self.weight.buffer(tokens, dtype)

    def rounds_gated(self, tokens: int, dtype: torch.dtype) -> bool:
        return self.weight.rounds_gated(tokens, dtype)


@dataclass(frozen=True)
class _NamedExperts:
    """One matrix of every expert, in whatever form, whose products are ranges under the names of the grouped ops."""

    experts: ExpertWeights
    ranges: _OpRanges

    @property
    def nbytes(self) -> int:
        return self.experts.nbytes

    def gate_up(self, x_TM: Tensor, bias_EO: Tensor | None, routes: Routes, gate: str) -> Tensor:
        with self.ranges.around(lambda: "grouped_gate_up"):
            return self.experts.gate_up(x_TM, bias_EO, routes, gate)

    def down(self, h_PF: Tensor, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None) -> Tensor:
        with self.ranges.around(lambda: "grouped_down"):
            return self.experts.down(h_PF, bias_EM, routes, add_TM)


def _noting(forward: Callable[..., Any], engine: Engine, shapes: list[StepShape]) -> Callable[..., Any]:
    def call(plan: StepPlan) -> Any:
        shapes.append(engine.shape_of(plan))
        return forward(plan)

    return call
