"""Makes a captured graph ready to be divided: fewer kinds of ops, and products of all dimensions that their rows have.

What only copies goes, pieces of a list become slices, and a product between two reshapes becomes one of many
dimensions, so that each of these can be divided.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from ridgeline.compiler.capture import _laid_out
from ridgeline.compiler.graph import GraphNode, GraphValue, OpGraph, TensorType, replaced
from ridgeline.compiler.sharding.products import DIVIDED, batched_product, product

aten = torch.ops.aten
COPIES = (aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default, _laid_out)
VIEWS = (aten.view.default, aten._unsafe_view.default)
NEW = {aten.new_zeros.default: 0, aten.new_ones.default: 1, aten.new_full.default: None}  # None: the last argument
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)


def prepare(graph: OpGraph) -> OpGraph:
    """Return the graph with all that a partitioner has rules for as ops of their own."""
    return without_unused(_with_wide_products(_with_slices(_without_copies(graph))))


def without_unused(graph: OpGraph) -> OpGraph:
    """Return the graph without nodes whose results nothing takes. Its calls must be functions of their operands."""
    needed = {value for value in graph.outputs if isinstance(value, GraphValue)}
    kept = []
    for node in reversed(graph.nodes):
        if node.result in needed:
            needed.update(node.values)
            kept.append(node)
    return OpGraph(graph.inputs, tuple(reversed(kept)), graph.outputs)


def _rewritten(graph: OpGraph, rewrite: Callable[[GraphNode], list[GraphNode] | GraphValue]) -> OpGraph:
    """Return the graph with other nodes in a node's place, or another value in its result's."""
    same: dict[GraphValue, GraphValue] = {}
    nodes: list[GraphNode] = []
    for each in graph.nodes:
        made = rewrite(replaced(each, same))
        if isinstance(made, GraphValue):
            same[each.result] = made
        else:
            nodes += made
    return OpGraph(graph.inputs, tuple(nodes), replaced(graph.outputs, same))


def _without_copies(graph: OpGraph) -> OpGraph:
    def rewrite(node: GraphNode) -> list[GraphNode] | GraphValue:
        if node.attributes.get("target") in NEW and node.result.type is not None:
            return [_full(node, NEW[node.attributes["target"]])]
        if node.attributes.get("target") in VIEWS:  # of what may have other strides by now
            x, sizes = node.attributes["arguments"]
            return [_call(node.result, aten.reshape.default, x, sizes)]
        copies = node.op == "call" and node.attributes["target"] in COPIES
        return node.values[0] if copies and node.values[0].type == node.result.type else [node]

    return _rewritten(graph, rewrite)


def _with_slices(graph: OpGraph) -> OpGraph:
    """Pieces that are taken of a list become slices of what was split."""
    makers = {node.result: node for node in graph.nodes}

    def rewrite(node: GraphNode) -> list[GraphNode] | GraphValue:
        if node.op != "call" or node.attributes["target"] is not operator.getitem:
            return [node]
        split = makers.get(node.values[0])
        if split is None or split.attributes.get("target") not in SPLITS or split.values[0].type is None:
            return [node]
        x, at = split.values[0], int(node.attributes["arguments"][1])
        rest = [*split.attributes["arguments"][1:], *split.attributes["named"].values()]
        if split.attributes["target"] is aten.unbind.int:
            return [_call(node.result, aten.select.int, x, rest[0] if rest else 0, at)]
        sizes, dim = rest[0], rest[1] if len(rest) > 1 else 0
        start = sizes * at if isinstance(sizes, int) else sum(sizes[:at])
        return [_call(node.result, aten.slice.Tensor, x, dim, start, start + node.result.tensor.shape[dim])]

    return _rewritten(graph, rewrite)


def _with_wide_products(graph: OpGraph) -> OpGraph:
    """reshape(mm(reshape(x), w)) becomes one product with the dimensions that x has, where reshapes only join and part
    its leading dimensions, and so does bmm with those of both."""
    makers = {node.result: node for node in graph.nodes}
    uses = graph.uses()
    names = _NewNames(graph)

    def rewrite(node: GraphNode) -> list[GraphNode] | GraphValue:
        inner = makers.get(node.values[0]) if node.attributes.get("target") is aten.reshape.default else None
        target = None if inner is None else inner.attributes.get("target")
        if inner is None or target not in (aten.mm.default, aten.bmm.default) or uses[inner.result] > 1:
            return [node]
        made, (a, b) = node.result.tensor.shape, inner.values
        if len(made) < 3:
            return [node]
        if target is aten.mm.default:
            x = _apart(makers.get(a))
            same = x is not None and x.tensor.shape == (*made[:-1], a.tensor.shape[-1])
            return [_call(node.result, product, x, b)] if same and x is not None else [node]
        nodes, operands = list[GraphNode](), list[GraphValue]()
        for each in (a, b):
            turned = makers.get(each)
            turns = turned is not None and _turns(turned)
            wide = _apart(makers.get(turned.values[0]) if turned is not None and turns else turned)
            if wide is None or wide.tensor.shape[:-2] != made[:-2]:
                return [node]
            if turns:
                *leading, rows, columns = wide.tensor.shape
                nodes.append(_call(names.new((*leading, columns, rows), wide), aten.transpose.int, wide, -2, -1))
                wide = nodes[-1].result
            if wide.tensor.shape[-2:] != each.tensor.shape[-2:]:
                return [node]
            operands.append(wide)
        return [*nodes, _call(node.result, batched_product, *operands)]

    return _rewritten(graph, rewrite)


def _apart(node: GraphNode | None) -> GraphValue | None:
    """Return the operand of a node if that is a reshape."""
    return node.values[0] if node is not None and node.attributes.get("target") is aten.reshape.default else None


def _turns(node: GraphNode) -> bool:
    """True if a node exchanges the last two of three dimensions."""
    target, given = node.attributes.get("target"), node.attributes.get("arguments", ())
    if target is aten.transpose.int:
        return len(node.result.tensor.shape) == 3 and {at % 3 for at in given[1:]} == {1, 2}
    return target is aten.permute.default and list(given[1]) == [0, 2, 1]


class _NewNames:
    """Names that a graph does not have yet."""

    def __init__(self, graph: OpGraph) -> None:
        self._taken, self._count = {value.name for value in graph.uses()}, 0

    def new(self, shape: tuple[int, ...], like: GraphValue) -> GraphValue:
        self._count += 1
        name = f"%t{self._count}"
        assert name not in self._taken
        return GraphValue(name, TensorType(shape, like.tensor.dtype))


def _full(node: GraphNode, number: int | None) -> GraphNode:
    """Return a node that makes the same numbers without an operand to take the dtype from."""
    made, arguments = node.result.tensor, node.attributes["arguments"]
    filled = number if number is not None else arguments[2]
    named = {"dtype": made.dtype, "device": node.attributes["named"].get("device") or torch.device("cpu")}
    attributes = {"target": aten.full.default, "arguments": (list(made.shape), filled), "named": named}
    return GraphNode("call", (), node.result, attributes)


def _call(result: GraphValue, target: object, *arguments: Any) -> GraphNode:
    operands = tuple(each for each in arguments if isinstance(each, GraphValue))
    return GraphNode("call", operands, result, {"target": target, "arguments": arguments, "named": {}})


def marks(graph: OpGraph) -> dict[GraphValue, str]:
    """Return the values that a module marked by `divided`, each with the layout it asks for."""
    found = {}
    for node in graph.nodes:
        if node.attributes.get("target") is DIVIDED:
            found[node.result] = str(node.attributes["arguments"][1])
    return found
