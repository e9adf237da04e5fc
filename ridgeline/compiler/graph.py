"""The graph that passes work on: values with a shape and a dtype, and nodes that make one value each.

A node is one of five kinds (ops.py): pointwise, a reduction of trailing dimensions that stay as 1, `call`, which is any
function of torch, `fused`, whose attribute `body` is a graph that becomes one kernel, and `product`, whose body begins
with the sums of two matrices. Nodes have no effects:
capture takes functional graphs alone, and calls that have effects keep their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ridgeline.compiler.ops import POINTWISE, REDUCTIONS, TAKEN
from ridgeline.core.errors import RidgelineError


class InvalidGraph(RidgelineError):
    """A graph breaks a rule of the verifier: a pass has a fault."""


@dataclass(frozen=True)
class TensorType:
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{TAKEN.get(self.dtype, self.dtype)}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, eq=False)
class GraphValue:
    """A value, by identity. type: None if it is no tensor of one known shape, and then only calls may take it."""

    name: str
    type: TensorType | None

    @property
    def tensor(self) -> TensorType:
        assert self.type is not None, f"{self.name} is no tensor"
        return self.type


Number = bool | int | float
Operand = GraphValue | Number


@dataclass(frozen=True, eq=False)
class GraphNode:
    """attributes: of a reduction `dims`, how many trailing ones; of a call `target`, `arguments` and `named`, in which
    values stand as they are; of a fused node `body`. others: what a fused node makes beside its result."""

    op: str
    operands: tuple[Operand, ...]
    result: GraphValue
    attributes: Mapping[str, Any] = field(default_factory=dict)
    others: tuple[GraphValue, ...] = ()

    @property
    def results(self) -> tuple[GraphValue, ...]:
        return (self.result, *self.others)

    @property
    def values(self) -> tuple[GraphValue, ...]:
        return tuple(each for each in self.operands if isinstance(each, GraphValue))


@dataclass(frozen=True, eq=False)
class OpGraph:
    """outputs: values, or what is given out as it is (None, numbers)."""

    inputs: tuple[GraphValue, ...]
    nodes: tuple[GraphNode, ...]
    outputs: tuple[Any, ...]

    def uses(self) -> dict[GraphValue, int]:
        """Return the number of times that nodes and outputs take each value."""
        counts = dict.fromkeys((*self.inputs, *(value for node in self.nodes for value in node.results)), 0)
        for value in (*(v for node in self.nodes for v in node.values), *self.outputs):
            if isinstance(value, GraphValue):
                counts[value] += 1
        return counts

    def __str__(self) -> str:
        return "\n".join(_lines(self, ""))


def replaced(tree: Any, by: Mapping[GraphValue, GraphValue]) -> Any:
    """Return a tree of arguments, or a node, with other values in the place of those that `by` names."""
    if isinstance(tree, GraphValue):
        return by.get(tree, tree)
    if isinstance(tree, GraphNode):
        taken = {name: replaced(each, by) for name, each in tree.attributes.items() if tree.op == "call"}
        return GraphNode(tree.op, replaced(tree.operands, by), tree.result, {**tree.attributes, **taken}, tree.others)
    if isinstance(tree, dict):
        return {name: replaced(each, by) for name, each in tree.items()}
    if isinstance(tree, slice):
        return slice(*(replaced(each, by) for each in (tree.start, tree.stop, tree.step)))
    if isinstance(tree, list):  # those of fx are a type of their own
        return [replaced(each, by) for each in tree]
    return tuple(replaced(each, by) for each in tree) if type(tree) is tuple else tree


def verify(graph: OpGraph) -> OpGraph:
    """Return the graph. Raise InvalidGraph if a value is taken before it is made or made twice, or if a node's type is
    not what its operands make."""
    known: set[GraphValue] = set()
    names: set[str] = set()
    for value in graph.inputs:
        _define(value, known, names)
    for node in graph.nodes:
        for value in node.values:
            if value not in known:
                raise InvalidGraph(f"{node.result.name} = {node.op} takes {value.name}, which no node before it makes.")
        _check(node)
        for value in node.results:
            _define(value, known, names)
    for value in graph.outputs:
        if isinstance(value, GraphValue) and value not in known:
            raise InvalidGraph(f"the output {value.name} is made by no node.")
    return graph


def made_type(op: str, operands: tuple[Operand, ...], dims: int = 0) -> TensorType:
    """Return the type that a pointwise op or a reduction makes. Raise InvalidGraph."""
    types = [each.tensor for each in operands if isinstance(each, GraphValue)]
    if op in REDUCTIONS:
        (only,) = types
        if not 1 <= dims <= len(only.shape):
            raise InvalidGraph(f"{op} of {dims} dimensions of {only} reduces none or more than there are.")
        return TensorType(only.shape[:-dims] + (1,) * dims, only.dtype)
    kind = POINTWISE[op]
    if len(operands) != kind.arity:
        raise InvalidGraph(f"{op} takes {kind.arity} operands, got {len(operands)}.")
    if not types:
        raise InvalidGraph(f"{op} takes numbers alone.")
    try:
        shape = tuple(torch.broadcast_shapes(*(each.shape for each in types)))
    except RuntimeError as error:
        raise InvalidGraph(f"{op} of {', '.join(map(str, types))}: the shapes do not fit.") from error
    dtypes = {each.dtype for each in (types[1:] if op == "where" else types)}
    if len(dtypes) > 1:
        raise InvalidGraph(f"{op} of {', '.join(map(str, types))}: the types differ; cast them first.")
    return TensorType(shape, torch.bool if kind.compares else dtypes.pop() if dtypes else torch.float32)


def _check(node: GraphNode) -> None:
    if node.op == "call":
        return
    if node.op == "fused":
        body = node.attributes["body"]
        verify(body)
        taken = [v.type for v in body.inputs] == [v.type for v in node.values]
        if not taken or [v.type for v in body.outputs] != [v.type for v in node.results]:
            raise InvalidGraph(f"{node.result.name}: the body's inputs or outputs are not those of the node.")
        made = body.outputs[0].type
    elif node.op == "product":
        made = _made_by_product(node)
    elif node.op == "cast":
        (operand,) = node.values
        made = TensorType(operand.tensor.shape, node.result.tensor.dtype)
    elif node.op in POINTWISE or node.op in REDUCTIONS:
        made = made_type(node.op, node.operands, node.attributes.get("dims", 0))
        if node.op == "where" and all(not isinstance(each, GraphValue) for each in node.operands[1:]):
            made = TensorType(made.shape, node.result.tensor.dtype)
    else:
        raise InvalidGraph(f"{node.result.name} = {node.op}: there is no such op.")
    if made != node.result.type:
        raise InvalidGraph(f"{node.result.name} = {node.op} is said to be {node.result.type}, and makes {made}.")


def _made_by_product(node: GraphNode) -> TensorType | None:
    """Return the type that a product with its epilogue makes. Raise InvalidGraph."""
    left, right, *others = node.values
    body: OpGraph = node.attributes["body"]
    verify(body)
    shapes = left.tensor.shape, right.tensor.shape
    if len(shapes[0]) != 2 or len(shapes[1]) != 2 or shapes[0][1] != shapes[1][0]:
        raise InvalidGraph(f"{node.result.name}: {left.type} and {right.type} are no matrices that can be multiplied.")
    sums = TensorType((shapes[0][0], shapes[1][1]), torch.float32)
    taken = [(v.tensor.dtype, v.tensor.shape) for v in others]
    given = [(v.tensor.dtype, v.tensor.shape) for v in body.inputs[1:]]
    fits = len(taken) == len(given) and all(
        a[0] == b[0] and torch.Size(a[1]).numel() == torch.Size(b[1]).numel() for a, b in zip(taken, given, strict=True)
    )
    if body.inputs[0].type != sums or not fits or len(body.outputs) != 1:
        raise InvalidGraph(f"{node.result.name}: the epilogue's inputs or outputs are not those of the product.")
    made: TensorType | None = body.outputs[0].type
    return made


def _define(value: GraphValue, known: set[GraphValue], names: set[str]) -> None:
    if value in known or value.name in names:
        raise InvalidGraph(f"{value.name} is made twice.")
    known.add(value)
    names.add(value.name)


def _lines(graph: OpGraph, indent: str) -> Iterator[str]:
    yield indent + "inputs " + ", ".join(f"{v.name}: {v.type}" for v in graph.inputs)
    for node in graph.nodes:
        told = f"{indent}{', '.join(f'{v.name}: {v.type}' for v in node.results)} = {node.op}"
        if node.op == "call":
            yield f"{told} {node.attributes['target']}({', '.join(v.name for v in node.values)})"
        else:
            dims = f" over {node.attributes['dims']}" if "dims" in node.attributes else ""
            yield f"{told}({', '.join(_named(each) for each in node.operands)}){dims}"
        if node.op in ("fused", "product"):
            yield from _lines(node.attributes["body"], indent + "    ")
    yield indent + "outputs " + ", ".join(_named(each) for each in graph.outputs)


def _named(operand: object) -> str:
    return operand.name if isinstance(operand, GraphValue) else repr(operand)
