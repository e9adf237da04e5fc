"""Drawn graphs with drawn annotations give what one device gives, and planted faults are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.compiler.capture import GraphBuilder
from ridgeline.compiler.graph import GraphNode, GraphValue, InvalidGraph, OpGraph, TensorType, replaced
from ridgeline.compiler.program import CompiledProgram
from ridgeline.compiler.sharding.check import check
from ridgeline.compiler.sharding.collectives import ALL_GATHER, ALL_REDUCE, MeshCollective, OwnPart
from ridgeline.compiler.sharding.layout import MeshShape, TensorLayout, layout_of
from ridgeline.compiler.sharding.minimise import minimise
from ridgeline.compiler.sharding.overlap import overlap
from ridgeline.compiler.sharding.partition import ShardedGraph, partition
from ridgeline.compiler.sharding.products import ATTENTION, batched_product, product
from ridgeline.compiler.sharding.run import assembled, simulated

aten = torch.ops.aten
MESH = MeshShape.parsed("dp=2,tp=2")
SIZES = (1, 2, 4, 8, 12)
NUMBERS = torch.float64  # small whole numbers, of which sums are exact in any order
Draw = Callable[[st.SearchStrategy], object]


class DrawnGraph:
    """A graph while ops are drawn. Its values stay small whole numbers."""

    def __init__(self, data: st.DataObject) -> None:
        self.data, self.builder = data, GraphBuilder()
        self.values: list[GraphValue] = []
        for _ in range(data.draw(st.integers(1, 3))):
            shape = tuple(data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)))
            self.values.append(self.builder.input(TensorType(shape, NUMBERS)))

    def one(self, rank: int = 0) -> GraphValue | None:
        """Draw a value with at least so many dimensions."""
        fitting = [each for each in self.values if len(each.tensor.shape) >= rank]
        return self.data.draw(st.sampled_from(fitting)) if fitting else None

    def call(self, target: Callable[..., Tensor], *arguments: object) -> None:
        examples = {
            each: torch.empty(each.tensor.shape, dtype=each.tensor.dtype, device="meta") for each in self.values
        }
        made = target(*replaced(tuple(arguments), examples))
        self.values.append(self.builder.call(TensorType(tuple(made.shape), made.dtype), target, tuple(arguments), {}))

    def input(self, *shape: int) -> GraphValue:
        self.values.append(self.builder.input(TensorType(shape, NUMBERS)))
        return self.values[-1]

    def step(self) -> None:
        kind = self.data.draw(st.sampled_from(sorted(STEPS)))
        x = self.one(2 if kind in WANTS_TWO else 1)
        if x is not None:
            STEPS[kind](self, x)


def pointwise(graph: DrawnGraph, x: GraphValue) -> None:
    op = graph.data.draw(st.sampled_from(["add", "sub", "maximum"]))
    others = [each for each in graph.values if _fits(x, each)]
    graph.values.append(graph.builder.add(op, x, graph.data.draw(st.sampled_from(others))))


def _fits(x: GraphValue, other: GraphValue) -> bool:
    try:
        torch.broadcast_shapes(x.tensor.shape, other.tensor.shape)
    except RuntimeError:
        return False
    return True


def scale(graph: DrawnGraph, x: GraphValue) -> None:
    graph.values.append(graph.builder.add("mul", x, graph.data.draw(st.sampled_from([-1.0, 2.0]))))


def reduction(graph: DrawnGraph, x: GraphValue) -> None:
    op = graph.data.draw(st.sampled_from(["sum", "amax", "amin"]))
    graph.values.append(graph.builder.add(op, x, dims=graph.data.draw(st.integers(1, len(x.tensor.shape)))))


def sum_of_some(graph: DrawnGraph, x: GraphValue) -> None:
    dim = graph.data.draw(st.integers(0, len(x.tensor.shape) - 1))
    graph.call(aten.sum.dim_IntList, x, [dim], graph.data.draw(st.booleans()))


def transposed(graph: DrawnGraph, x: GraphValue) -> None:
    order = graph.data.draw(st.permutations(range(len(x.tensor.shape))))
    graph.call(aten.permute.default, x, list(order))


def reshaped(graph: DrawnGraph, x: GraphValue) -> None:
    shape = list(x.tensor.shape)
    if graph.data.draw(st.booleans()) and len(shape) > 1:
        at = graph.data.draw(st.integers(0, len(shape) - 2))
        shape[at : at + 2] = [shape[at] * shape[at + 1]]
    else:
        at = graph.data.draw(st.integers(0, len(shape) - 1))
        parts = [size for size in (1, 2, 4) if shape[at] % size == 0]
        inner = graph.data.draw(st.sampled_from(parts))
        shape[at : at + 1] = [shape[at] // inner, inner]
    graph.call(aten.reshape.default, x, shape)


def piece(graph: DrawnGraph, x: GraphValue) -> None:
    dim = graph.data.draw(st.integers(0, len(x.tensor.shape) - 1))
    size = x.tensor.shape[dim]
    start = graph.data.draw(st.integers(0, size - 1))
    graph.call(aten.slice.Tensor, x, dim, start, graph.data.draw(st.integers(start + 1, size)))


def beside(graph: DrawnGraph, x: GraphValue) -> None:
    graph.call(aten.cat.default, [x, x], graph.data.draw(st.integers(0, len(x.tensor.shape) - 1)))


def multiplied(graph: DrawnGraph, x: GraphValue) -> None:
    wide = graph.data.draw(st.sampled_from(SIZES))
    target = aten.mm.default if len(x.tensor.shape) == 2 else product
    small = graph.builder.add("maximum", graph.builder.add("minimum", x, 3.0), -3.0)
    graph.values.append(small)
    graph.call(target, small, graph.input(x.tensor.shape[-1], wide))


def multiplied_by_itself(graph: DrawnGraph, x: GraphValue) -> None:
    small = graph.builder.add("maximum", graph.builder.add("minimum", x, 3.0), -3.0)
    graph.values.append(small)
    graph.call(aten.transpose.int, small, -2, -1)
    graph.call(batched_product, small, graph.values[-1])


def looked_up(graph: DrawnGraph, x: GraphValue) -> None:
    width = x.tensor.shape[1]
    if len(x.tensor.shape) != 2:
        return
    ids = GraphValue(f"%ids{len(graph.builder.inputs)}", TensorType((4, 2), torch.int64))
    graph.builder.inputs.append(ids)
    made = TensorType((4, 2, width), NUMBERS)
    graph.values.append(graph.builder.call(made, aten.embedding.default, (x, ids), {}))


STEPS: dict[str, Callable[[DrawnGraph, GraphValue], None]] = {
    "beside": beside, "by itself": multiplied_by_itself, "lookup": looked_up, "piece": piece, "pointwise": pointwise,
    "product": multiplied, "reduction": reduction, "reshape": reshaped, "scale": scale, "some": sum_of_some,
    "transposed": transposed,
}  # fmt: skip
WANTS_TWO = ("product", "by itself", "lookup")


def drawn_layout(data: st.DataObject, type: TensorType) -> TensorLayout:
    texts, free = [], list(MESH.names)
    for size in type.shape:
        choices = ["-"] + [axis for axis in free if size % 2 == 0]
        if len(free) == 2 and size % 4 == 0:
            choices += ["dp+tp", *([f"{axis}:{size // 2}/{size // 2}" for axis in free])]
        text = data.draw(st.sampled_from(choices))
        free = [axis for axis in free if axis not in text]
        texts.append(text)
    return layout_of(",".join(texts), type.shape, MESH)


def equal_on_all_ranks(sharded: ShardedGraph, inputs: list[Tensor], want: tuple[Tensor, ...]) -> None:
    check(sharded)
    outputs = zip(*simulated(sharded, inputs), strict=True)
    for parts, layout, wanted in zip(outputs, sharded.promised, want, strict=True):
        assert layout is not None
        assert torch.equal(assembled(parts, layout, MESH), wanted)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_drawn_graphs_give_what_one_device_gives(data: st.DataObject) -> None:
    drawn = DrawnGraph(data)
    for _ in range(data.draw(st.integers(1, 8))):
        drawn.step()
    count = data.draw(st.integers(1, 2))
    made = [each for each in drawn.values if each not in drawn.builder.inputs] or drawn.values
    graph = drawn.builder.done(tuple(made[-count:]))
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randint(2, each.tensor.shape, generator=generator)
        if each.tensor.dtype == torch.int64
        else torch.randint(-2, 3, each.tensor.shape, generator=generator).to(NUMBERS)
        for each in graph.inputs
    ]
    inputs = [_within(each, graph, at, inputs) for at, each in enumerate(inputs)]
    annotated = {
        value: drawn_layout(data, value.tensor)
        for value in (*graph.inputs, *(node.result for node in graph.nodes))
        if data.draw(st.booleans())
    }
    outputs = [drawn_layout(data, value.tensor) if data.draw(st.booleans()) else None for value in graph.outputs]
    want = CompiledProgram(graph)(*inputs)
    sharded = partition(graph, annotated, MESH, outputs)
    equal_on_all_ranks(sharded, inputs, want)
    equal_on_all_ranks(minimise(sharded), inputs, want)
    equal_on_all_ranks(overlap(minimise(sharded)), inputs, want)


def _within(each: Tensor, graph: OpGraph, at: int, inputs: list[Tensor]) -> Tensor:
    """Keep ids within the tables that they are looked up in."""
    for node in graph.nodes:
        if node.attributes.get("target") is aten.embedding.default and node.values[1] is graph.inputs[at]:
            return each % node.values[0].tensor.shape[0]
    return each


def pair() -> tuple[ShardedGraph, list[Tensor], Tensor]:
    """A table, two products and a softmax over divided columns: sums, largest numbers, parts and a gather."""
    builder = GraphBuilder()
    numbers, ids = torch.float32, TensorType((4, 2), torch.int64)
    table, first, second = (builder.input(TensorType(shape, numbers)) for shape in ((8, 8), (8, 12), (12, 4)))
    at = builder.input(ids)
    x = builder.call(TensorType((4, 2, 8), numbers), aten.embedding.default, (table, at), {})
    h = builder.call(TensorType((4, 2, 12), numbers), product, (x, first), {})
    shifted = builder.add("exp", builder.add("sub", h, builder.add("amax", h, dims=1)))
    h = builder.add("div", shifted, builder.add("sum", shifted, dims=1))
    y = builder.call(TensorType((4, 2, 4), numbers), product, (h, second), {})
    graph = builder.done((builder.add("add", y, 1.0),))
    texts = ("tp,-", "-,tp", "tp,-", "dp,-")
    annotated = {
        value: layout_of(text, value.tensor.shape, MESH) for value, text in zip(graph.inputs, texts, strict=True)
    }
    torch.manual_seed(0)
    inputs = [torch.randn(8, 8), torch.randn(8, 12), torch.randn(12, 4), torch.randint(8, (4, 2))]
    [want] = CompiledProgram(graph)(*inputs)
    return partition(graph, annotated, MESH), inputs, want


def planted() -> Iterator[tuple[str, ShardedGraph]]:
    """Yield graphs with one fault each."""
    whole, _, _ = pair()
    nodes = whole.graph.nodes
    for at, node in enumerate(nodes):
        target = node.attributes.get("target")
        if isinstance(target, MeshCollective):
            by = {node.result: node.values[0]}
            rest = tuple(replaced(each, by) for each in nodes[at + 1 :])
            outputs = replaced(whole.graph.outputs, by)
            origins = {**whole.origins, **dict(zip(rest, map(whole.origins.get, nodes[at + 1 :]), strict=True))}
            dropped = OpGraph(whole.graph.inputs, (*nodes[:at], *rest), outputs)
            yield f"a dropped {target}", replace(whole, graph=dropped, origins=origins)
            other = "dp" if target.axis == "tp" else "tp"
            yield f"a wrong axis of {target}", changed(whole, node, target=replace(target, axis=other))
            if target.kind == ALL_REDUCE:
                how = "amax" if target.how == "sum" else "sum"
                yield f"another reduction than {target}", changed(whole, node, target=replace(target, how=how))
            if target.kind == ALL_GATHER:
                yield f"another dimension than {target}", changed(whole, node, target=replace(target, dim=1))
        elif isinstance(target, OwnPart):
            yield f"a part twice: {target}", changed(whole, node, target=replace(target, axis="tp"))
        elif node.op in ("amax", "sum"):
            yield f"another op than {node.op}", exchanged(whole, node, replace(node, op="amin"))
        elif node.op == "add":
            yield "another number", exchanged(whole, node, replace(node, operands=(node.operands[0], 2.0)))
        elif node.op == "sub":
            turned = replace(node, operands=(node.operands[0], node.operands[0]))
            yield "another operand", exchanged(whole, node, turned)
        elif "lookup" in str(target):
            yield "a lookup in a part", changed(whole, node, target=aten.embedding.default)


def changed(whole: ShardedGraph, node: GraphNode, *, target: object) -> ShardedGraph:
    return exchanged(whole, node, replace(node, attributes={**node.attributes, "target": target}))


def exchanged(whole: ShardedGraph, node: GraphNode, other: GraphNode) -> ShardedGraph:
    nodes = tuple(other if each is node else each for each in whole.graph.nodes)
    origins = {**whole.origins, other: whole.origins[node]}
    return replace(whole, graph=replace(whole.graph, nodes=nodes), origins=origins)


def test_the_graph_in_which_faults_are_planted_is_right() -> None:
    sharded, inputs, want = pair()
    check(sharded)
    [parts] = zip(*simulated(sharded, inputs), strict=True)
    torch.testing.assert_close(assembled(parts, sharded.promised[0], MESH), want)  # type: ignore[arg-type]
    assert {each.kind for _, each in sharded.collectives()} == {ALL_REDUCE, ALL_GATHER}


@pytest.mark.parametrize("fault", [name for name, _ in planted()])
def test_the_verifier_finds(fault: str) -> None:
    with pytest.raises(InvalidGraph):
        check(dict(planted())[fault])


def test_ops_that_draw_numbers_are_refused() -> None:
    builder = GraphBuilder()
    x = builder.input(TensorType((4, 4), torch.float32))
    y = builder.call(x.type, aten.rand_like.default, (x,), {})
    with pytest.raises(InvalidGraph, match="draws numbers"):
        partition(builder.done((y,)), {}, MESH)


def test_attention_is_divided_by_heads_and_never_by_keys() -> None:
    builder = GraphBuilder()
    q, k, v = (builder.input(TensorType((2, heads, 4, 8), torch.float32)) for heads in (4, 2, 2))
    y = builder.call(TensorType((2, 4, 4, 8), torch.float32), ATTENTION, (q, k, v, None, False, 0.5), {})
    graph = builder.done((y,))
    inputs = [torch.randn(value.tensor.shape) for value in graph.inputs]
    [want] = CompiledProgram(graph)(*inputs)
    for text, kinds in (("dp,tp,-,-", [ALL_GATHER] * 2), ("-,-,tp,-", [ALL_GATHER])):
        sharded = check(partition(graph, {k: layout_of(text, k.tensor.shape, MESH)}, MESH))
        [parts] = zip(*simulated(sharded, inputs), strict=True)
        torch.testing.assert_close(assembled(parts, sharded.promised[0], MESH), want)  # type: ignore[arg-type]
        assert [each.kind for _, each in sharded.collectives()] == kinds
