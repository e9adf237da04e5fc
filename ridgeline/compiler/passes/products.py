"""Takes what follows a product into it: `mm` or `addmm` with the pointwise nodes behind it become one node.

A product node takes its two matrices, of [m, k] and [k, n], and what its epilogue reads. Its body is a graph of values
of two dimensions: the first input is the sum in float32, which is rounded first where torch's product would be. Between
the product and what follows may stand a view that only divides the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ridgeline.compiler.graph import GraphNode, GraphValue, OpGraph, TensorType
from ridgeline.compiler.ops import POINTWISE
from ridgeline.compiler.products.text import ProductSpec

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
DTYPES = (torch.float32, torch.bfloat16)  # of matrices
READ = (torch.float32, torch.bfloat16, torch.float16)  # by an epilogue
Worth = Callable[[ProductSpec], bool]  # whether a target multiplies faster than torch and the epilogue's own kernel


@dataclass(frozen=True)
class FoundProduct:
    """A call of torch that multiplies, and the nodes that go with it. bias: None, or what is added to each row."""

    left: GraphValue
    right: GraphValue
    bias: GraphValue | None
    result: GraphValue
    nodes: tuple[GraphNode, ...]


def products(graph: OpGraph, worth: Worth) -> OpGraph:
    """Return the graph with products that are worth it and what follows each as one node."""
    makers = {node.result: node for node in graph.nodes}
    uses = graph.uses()
    nodes: list[GraphNode] = []
    gone: set[GraphNode] = set()
    for node in graph.nodes:
        made = _joined(node, makers, uses, worth)
        if made is None:
            nodes.append(node)
            continue
        found, joined = made
        gone.update(found.nodes)
        nodes += joined
    return OpGraph(graph.inputs, tuple(node for node in nodes if node not in gone), graph.outputs)


def _joined(
    node: GraphNode, makers: Mapping[GraphValue, GraphNode], uses: Mapping[GraphValue, int], worth: Worth
) -> tuple[FoundProduct, list[GraphNode]] | None:
    """Return a product that a node follows alone, and the nodes that stand for both."""
    if node.op not in POINTWISE and (node.op != "fused" or node.attributes["reduced"] or node.others):
        return None
    shape = node.result.tensor.shape
    for value in dict.fromkeys(node.values):
        found = _product(value, makers, uses, sum(each is value for each in node.values))
        if found is None or value.tensor.shape != shape or not shape:
            continue
        body = _body(node, value, found)
        if body is None:
            continue
        epilogue, others = body
        (m, k), n = found.left.tensor.shape, found.right.tensor.shape[1]
        spec = ProductSpec(m, n, k, epilogue, found.left.tensor.dtype)
        if not worth(spec):
            continue
        flat = TensorType((m, n), spec.out)
        view = shape != (m, n)
        result = GraphValue(f"{node.result.name}_flat", flat) if view else node.result
        operands = (found.left, found.right, *others)
        made = [GraphNode("product", operands, result, {"body": epilogue})]
        if view:
            call = {"target": aten.view.default, "arguments": (result, list(shape)), "named": {}}
            made.append(GraphNode("call", (result,), node.result, call))
        return found, made
    return None


def _product(
    value: GraphValue, makers: Mapping[GraphValue, GraphNode], uses: Mapping[GraphValue, int], taken: int
) -> FoundProduct | None:
    """Return the product whose result a value is, or a view of it, if nothing else takes it."""
    node, behind = makers.get(value), []
    while node is not None and node.op == "call" and node.attributes["target"] in VIEWS and uses[node.result] == taken:
        behind.append(node)
        node, taken = makers.get(node.attributes["arguments"][0]), 1
    if node is None or node.op != "call" or uses[node.result] != taken or node.attributes["named"]:
        return None
    target, arguments = node.attributes["target"], node.attributes["arguments"]
    if target is aten.mm.default:
        (left, right), bias = arguments, None
    elif target is aten.addmm.default and len(arguments) == 3:
        bias, left, right = arguments
    else:
        return None
    values = [each for each in (left, right, bias) if each is not None]
    if any(each.type is None or each.type.dtype not in DTYPES for each in values) or node.result.type is None:
        return None
    columns = right.tensor.shape[1]
    if bias is not None and (bias.tensor.shape != (columns,) or bias.tensor.dtype != left.tensor.dtype):
        return None
    if 0 in (*left.tensor.shape, columns) or value.tensor.shape[-1:] != (columns,):
        return None
    return FoundProduct(left, right, bias, node.result, (*behind, node))


def _body(node: GraphNode, value: GraphValue, found: FoundProduct) -> tuple[OpGraph, list[GraphValue]] | None:
    """Return an epilogue of two dimensions, and the values that it takes besides the sum; None if one has another form
    than rows, columns or both."""
    m, n = found.result.tensor.shape
    lead = node.result.tensor.shape[:-1]
    builder = _BodyBuilder((m, n), lead)
    sums = builder.value(TensorType((m, n), torch.float32))
    inputs, others, total = [sums], list[GraphValue](), sums
    if found.bias is not None:
        bias = builder.value(found.bias.tensor)
        inputs.append(bias)
        others.append(found.bias)
        total = builder.node("add", (total, builder.cast(bias, torch.float32)), TensorType((m, n), torch.float32))
    total = builder.cast(total, value.tensor.dtype)
    by: dict[GraphValue, GraphValue] = {}
    steps: tuple[GraphNode, ...] = (node,)
    places = dict(zip(node.values, node.values, strict=True))
    if node.op == "fused":
        body: OpGraph = node.attributes["body"]
        steps, places = body.nodes, dict(zip(body.inputs, node.values, strict=True))
    for inner, outer in places.items():
        if outer is value:
            by[inner] = total
            continue
        if outer.type is None or (flat := builder.flat(outer.type.shape)) is None or outer.type.dtype not in READ:
            return None
        by[inner] = builder.value(TensorType(flat, outer.type.dtype))
        inputs.append(by[inner])
        others.append(outer)
    for step in steps:
        flat = builder.flat(step.result.tensor.shape)
        if flat is None:
            return None
        operands = tuple(by[each] if isinstance(each, GraphValue) else each for each in step.operands)
        by[step.result] = builder.node(step.op, operands, TensorType(flat, step.result.tensor.dtype))
    last = by[steps[-1].result]
    if last.tensor.shape != (m, n):
        return None
    return OpGraph(tuple(inputs), tuple(builder.nodes), (last,)), others


class _BodyBuilder:
    """A body of values of two dimensions, whose rows are those of some leading dimensions."""

    def __init__(self, sizes: tuple[int, int], lead: tuple[int, ...]) -> None:
        self._sizes, self._lead = sizes, lead
        self.nodes: list[GraphNode] = []
        self._count = 0

    def value(self, type: TensorType) -> GraphValue:
        self._count += 1
        return GraphValue(f"%{self._count - 1}", type)

    def node(self, op: str, operands: tuple[object, ...], type: TensorType) -> GraphValue:
        result = self.value(type)
        self.nodes.append(GraphNode(op, operands, result))  # type: ignore[arg-type]
        return result

    def cast(self, value: GraphValue, dtype: torch.dtype) -> GraphValue:
        if value.tensor.dtype == dtype:
            return value
        return self.node("cast", (value,), TensorType(value.tensor.shape, dtype))

    def flat(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return a shape that broadcasts to the rows and columns; None if it has a part of the leading dimensions."""
        if len(shape) <= 1:
            return shape
        lead = shape[:-1]
        if all(size == 1 for size in lead):
            return shape[-1:]
        if math.prod(lead) == self._sizes[0] and lead == self._lead[len(self._lead) - len(lead) :]:
            return (self._sizes[0], shape[-1])
        return None
