"""Keeps what lies between the ops of one kernel in float32, where torch would round it to 16 bits after each op.

A value that is rounded to 16 bits and then computed with again is taken unrounded. What a kernel writes is rounded as
before, and so is what another kernel or a call reads. So results are nearer to those of exact arithmetic than torch's,
and a value beyond float16's range within a kernel is no infinity. Inductor does the same by default.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ridgeline.compiler.graph import GraphNode, GraphValue, OpGraph, replaced

HALF = (torch.float16, torch.bfloat16)


def widen(graph: OpGraph) -> OpGraph:
    """Return the graph with bodies of fused nodes that round only what they write."""
    return replace(graph, nodes=tuple(_widened(node) if node.op == "fused" else node for node in graph.nodes))


def _widened(node: GraphNode) -> GraphNode:
    body: OpGraph = node.attributes["body"]
    makers = {each.result: each for each in body.nodes}
    unrounded: dict[GraphValue, GraphValue] = {}
    nodes: list[GraphNode] = []
    for each in body.nodes:
        moved: GraphNode = replaced(each, unrounded)
        if each.op == "cast" and each.result.tensor.dtype == torch.float32:
            rounding = makers.get(each.values[0])
            if rounding is not None and rounding.op == "cast" and rounding.result.tensor.dtype in HALF:
                (wide,) = rounding.values
                if wide.tensor.dtype == torch.float32:
                    unrounded[each.result] = unrounded.get(wide, wide)
                    continue
        nodes.append(moved)
    needed = {value for value in body.outputs if isinstance(value, GraphValue)}
    kept = []
    for each in reversed(nodes):
        if each.result in needed:
            needed.update(each.values)
            kept.append(each)
    return replace_body(node, replace(body, nodes=tuple(reversed(kept))))


def replace_body(node: GraphNode, body: OpGraph) -> GraphNode:
    """Return a fused node with another body, whose values are named anew in order: equal bodies have equal names."""
    names = {value: GraphValue(f"%{at}", value.type) for at, value in enumerate(body.inputs)}
    nodes = []
    for each in body.nodes:
        operands = replaced(each.operands, names)
        names[each.result] = GraphValue(f"%{len(names)}", each.result.type)
        nodes.append(GraphNode(each.op, operands, names[each.result], each.attributes))
    renamed = OpGraph(tuple(names[each] for each in body.inputs), tuple(nodes), replaced(body.outputs, names))
    return replace(node, attributes={**node.attributes, "body": renamed})
