"""Runs a graph whose groups are kernels: the steps in order, each with what it takes and what it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ridgeline.compiler.graph import GraphNode, GraphValue, OpGraph, replaced
from ridgeline.compiler.ops import POINTWISE, REDUCTIONS
from ridgeline.compiler.targets import CpuTarget, Target, told_once
from ridgeline.core.errors import RidgelineError
from ridgeline.kernels.cuda.driver import DriverError

Step = Callable[[dict[Any, Any]], Sequence[Any]]  # of the values of a node's results


class CompiledProgram:
    """A function of tensors. It holds the kernels, and lets a tensor go behind the last step that takes it."""

    def __init__(self, graph: OpGraph, target: Target | None = None) -> None:
        self.graph, self.target = graph, CpuTarget() if target is None else target
        self.fallbacks: list[str] = []  # why groups run op by op
        last = {value: at for at, node in enumerate(graph.nodes) for value in node.values}
        kept = {value for value in graph.outputs if isinstance(value, GraphValue)}
        self._steps = [
            (node.results, self._step(node), [v for v in dict.fromkeys(node.values) if last[v] == at and v not in kept])
            for at, node in enumerate(graph.nodes)
        ]

    @property
    def num_kernels(self) -> int:
        return sum(node.op in ("fused", "product") for node in self.graph.nodes)

    def _step(self, node: GraphNode) -> Step:
        if node.op == "call":
            called, arguments, named = (node.attributes[name] for name in ("target", "arguments", "named"))
            return lambda values: (called(*replaced(arguments, values), **replaced(named, values)),)
        if node.op not in ("fused", "product"):
            return lambda values: (plain(node, values),)
        try:
            kernel = self.target.kernel(node)
        except RidgelineError as error:
            self.fallbacks.append(str(error))
            told_once(str(error))
            return lambda values: plain_fused(node, values)
        taken, types = node.values, [value.tensor for value in node.results]
        matrices = 2 if node.op == "product" else 0  # which may lie either way

        def run(values: dict[Any, Any]) -> list[torch.Tensor]:
            inputs = [values[value].resolve_neg() for value in taken]
            inputs[matrices:] = [each.contiguous() for each in inputs[matrices:]]
            made = [torch.empty(each.shape, dtype=each.dtype, device=inputs[0].device) for each in types]
            try:
                kernel(inputs, made)
            except (DriverError, RidgelineError) as error:  # a driver does not take the code, or a layout has no kernel
                told_once(str(error))
                return plain_fused(node, values)
            return made

        return run

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        values: dict[Any, Any] = dict(zip(self.graph.inputs, arguments, strict=True))
        for results, step, free in self._steps:
            values.update(zip(results, step(values), strict=True))
            for value in free:
                del values[value]
        return tuple(values[each] if isinstance(each, GraphValue) else each for each in self.graph.outputs)


def plain(node: GraphNode, values: dict[Any, Any]) -> torch.Tensor:
    """Return the value of a node, made by torch's own function. A fused node and a product run their bodies so."""
    if node.op in ("fused", "product"):
        return plain_fused(node, values)[0]
    if node.op in REDUCTIONS:
        along = tuple(range(-node.attributes["dims"], 0))
        return REDUCTIONS[node.op].plain(values[node.operands[0]], dim=along, keepdim=True)
    if node.op == "cast":
        return values[node.operands[0]].to(node.result.tensor.dtype)
    data = node.values[-1].tensor.dtype
    taken = [
        values[each] if isinstance(each, GraphValue) else torch.tensor(each, dtype=data, device="cpu")
        for each in node.operands
    ]
    return POINTWISE[node.op].plain(*taken)


def plain_fused(node: GraphNode, values: dict[Any, Any]) -> list[torch.Tensor]:
    """Return the values of a fused node or a product, whose body runs op by op."""
    body: OpGraph = node.attributes["body"]
    taken = [values[each] for each in node.values]
    if node.op == "product":
        others = zip(taken[2:], body.inputs[1:], strict=True)
        taken = [torch.mm(*taken[:2]).float(), *(x.reshape(value.tensor.shape) for x, value in others)]
    inner = dict(zip(body.inputs, taken, strict=True))
    for each in body.nodes:
        inner[each.result] = plain(each, inner)
    return [inner[output] for output in body.outputs]
