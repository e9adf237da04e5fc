"""Leaves out what is computed twice or never taken: common subexpressions and dead nodes.

Calls are kept as they are: a function of torch may draw numbers or write, which the graph does not say. Two values that
outputs or calls take stay two tensors: a caller may write to one of them.
"""

from __future__ import annotations

from ridgeline.compiler.graph import GraphNode, GraphValue, Operand, OpGraph, replaced


def canonicalize(graph: OpGraph) -> OpGraph:
    """Return the graph without equal nodes and without nodes that nothing takes."""
    same: dict[GraphValue, GraphValue] = {}
    seen: dict[object, GraphValue] = {}
    nodes: list[GraphNode] = []
    apart = {each for each in graph.outputs if isinstance(each, GraphValue)}
    apart.update(value for node in graph.nodes if node.op == "call" for value in node.values)
    for each in graph.nodes:
        node: GraphNode = replaced(each, same)
        key = (node.op, node.result.type, tuple(map(_key, node.operands)), node.attributes.get("dims"))
        if node.op == "call" or key not in seen or (node.result in apart and seen[key] in apart):
            nodes.append(node)
            seen.setdefault(key, node.result)
        else:
            same[node.result] = seen[key]
    outputs = replaced(graph.outputs, same)
    needed = {value for value in outputs if isinstance(value, GraphValue)}
    kept: list[GraphNode] = []
    for node in reversed(nodes):
        if node.op == "call" or node.result in needed:
            needed.update(node.values)
            kept.append(node)
    return OpGraph(graph.inputs, tuple(reversed(kept)), outputs)


def _key(operand: Operand) -> object:
    return operand if isinstance(operand, GraphValue) else (type(operand), repr(operand))
