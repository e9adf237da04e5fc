"""The verifier finds faults that a pass could make, and the passes say what they did."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.compiler.capture import GraphBuilder, capture
from ridgeline.compiler.graph import GraphNode, GraphValue, InvalidGraph, OpGraph, TensorType, verify
from ridgeline.compiler.passes.canonicalize import canonicalize
from ridgeline.compiler.passes.fuse import MOST_NODES, fuse
from ridgeline.compiler.program import CompiledProgram

X = TensorType((4, 8), torch.float32)


def softmax() -> OpGraph:
    builder = GraphBuilder()
    x = builder.input(X)
    shifted = builder.add("sub", x, builder.add("amax", x, dims=1))
    builder.add("exp", shifted)  # twice, and the first is never taken
    powers = builder.add("exp", shifted)
    return builder.done((builder.add("div", powers, builder.add("sum", powers, dims=1)),))


def test_what_is_computed_twice_or_never_taken_is_left_out() -> None:
    graph = verify(softmax())
    assert [node.op for node in graph.nodes] == ["amax", "sub", "exp", "exp", "sum", "div"]
    assert [node.op for node in verify(canonicalize(graph)).nodes] == ["amax", "sub", "exp", "sum", "div"]


def test_a_group_is_printed_with_what_is_in_it() -> None:
    assert str(verify(fuse(canonicalize(softmax())))).splitlines() == [
        "inputs %0: f32[4, 8]",
        "%6: f32[4, 8] = fused(%0)",
        "    inputs %0: f32[4, 8]",
        "    %1: f32[4, 1] = amax(%0) over 1",
        "    %2: f32[4, 8] = sub(%0, %1)",
        "    %3: f32[4, 8] = exp(%2)",
        "    %4: f32[4, 1] = sum(%3) over 1",
        "    %5: f32[4, 8] = div(%3, %4)",
        "    outputs %5",
        "outputs %6",
    ]


def test_a_sum_and_its_norm_are_one_group_with_two_outputs_and_what_waits_stays_out() -> None:
    builder = GraphBuilder()
    x, y = builder.input(X), builder.input(X)
    h = builder.add("add", x, y)
    norm = builder.add("div", h, builder.add("sum", h, dims=1))
    called = builder.call(X, torch.relu, (h,), {})
    graph = verify(fuse(builder.done((norm, h, called))))
    assert [node.op for node in graph.nodes] == ["fused", "call"]
    assert str(graph).splitlines()[1] == "%4: f32[4, 8], %2: f32[4, 8] = fused(%0, %1)"
    builder = GraphBuilder()
    x = builder.input(X)
    h = builder.add("exp", x)
    last = builder.add(
        "mul", builder.add("neg", h), builder.call(X, torch.relu, (h,), {})
    )  # the group would wait for it
    graph = verify(fuse(builder.done((last,))))
    assert [node.op for node in graph.nodes] == ["exp", "call", "fused"]


def planted() -> dict[str, OpGraph]:
    graph = fuse(canonicalize(softmax()))
    (node,) = graph.nodes
    body: OpGraph = node.attributes["body"]
    first, second, *rest = body.nodes
    lost = GraphValue("%99", X)

    def inside(*nodes: GraphNode) -> OpGraph:
        other = GraphNode(node.op, node.operands, node.result, {**node.attributes, "body": replace(body, nodes=nodes)})
        return replace(graph, nodes=(other,))

    return {
        "swapped": inside(second, first, *rest),
        "made twice": inside(first, first, second, *rest),
        "an operand that nothing makes": inside(replace(first, operands=(lost,)), second, *rest),
        "a wrong shape": inside(replace(first, attributes={"dims": 2}), second, *rest),
        "a dropped operand": inside(first, replace(second, operands=second.operands[:1]), *rest),
        "no such op": inside(replace(first, op="median"), second, *rest),
        "an output that nothing makes": replace(graph, outputs=(lost,)),
        "a wrong dtype": inside(
            first, replace(second, result=GraphValue(second.result.name, TensorType((4, 8), torch.float64))), *rest
        ),
        "a lost input": replace(graph, nodes=(replace(node, operands=()),)),
    }


@pytest.mark.parametrize("fault", planted())
def test_the_verifier_finds(fault: str) -> None:
    with pytest.raises(InvalidGraph):
        verify(planted()[fault])


def test_a_graph_that_writes_is_refused() -> None:
    module = torch.fx.symbolic_trace(lambda x: torch.ops.aten.add_.Tensor(x, x))
    with pytest.raises(InvalidGraph, match="functionalize the graph first"):
        capture(module)


def test_a_long_chain_is_several_groups() -> None:
    builder = GraphBuilder()
    value = builder.input(X)
    for _ in range(1500):
        value = builder.add("neg", value)
    graph = verify(fuse(builder.done((value,))))
    sizes = [len(node.attributes["body"].nodes) for node in graph.nodes]
    assert sum(sizes) == 1500
    assert max(sizes) == MOST_NODES
    x = torch.randn(4, 8)
    (made,) = CompiledProgram(graph)(x)
    torch.testing.assert_close(made, x)


def test_a_sum_of_16_bits_that_several_groups_widen_is_still_written() -> None:
    """As in a decoder's residual stream: one group normalizes it, and behind a call another adds to it."""
    builder, half = GraphBuilder(), TensorType((4, 8), torch.bfloat16)
    x, y = builder.input(half), builder.input(half)
    wide = [builder.cast(each, torch.float32) for each in (x, y)]
    s = builder.cast(builder.add("add", *wide), torch.bfloat16)
    w = builder.cast(s, torch.float32)
    first = builder.cast(builder.add("div", w, builder.add("sum", w, dims=1)), torch.bfloat16)
    called = builder.call(half, torch.neg, (first,), {})
    last = builder.add("exp", builder.add("add", w, builder.cast(called, torch.float32)))
    graph = verify(fuse(verify(canonicalize(builder.done((last,))))))
    assert [node.op for node in graph.nodes] == ["fused", "fused", "call", "fused"]
    given = [torch.randn(4, 8).to(torch.bfloat16) for _ in range(2)]
    total = (given[0].float() + given[1].float()).to(torch.bfloat16).float()
    want = (total - (total / total.sum(-1, keepdim=True)).to(torch.bfloat16).float()).exp()
    torch.testing.assert_close(CompiledProgram(graph)(*given)[0], want)
