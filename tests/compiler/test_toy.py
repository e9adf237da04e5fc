"""The six chapters of MLIR's Toy tutorial on our own graph: from a text to machine code, a step a test."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.compiler import mlir
from ridgeline.compiler.graph import InvalidGraph, OpGraph, TensorType
from ridgeline.compiler.linalg import kernel_text
from ridgeline.compiler.lower import lower
from ridgeline.compiler.ops import POINTWISE, REDUCTIONS
from ridgeline.compiler.parse import parse, split
from ridgeline.compiler.passes.canonicalize import canonicalize
from ridgeline.compiler.passes.fuse import fuse
from ridgeline.compiler.program import CompiledProgram, plain

NORM = """
    inputs %x: f32[8, 64], %w: f32[64]
    %square = mul(%x, %x)
    %sum = sum(%square) over 1
    %mean = div(%sum, 64.0)
    %again = mul(%x, %x)        # the same as %square
    %unused = exp(%again)
    %root = sqrt(%mean)
    %scaled = div(%x, %root)
    %y = mul(%scaled, %w)
    outputs %y
"""


def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt() * w


def test_chapter_1_a_text_is_split_into_its_parts() -> None:
    parts = split(NORM)
    assert [name for name, _ in parts.inputs] == ["%x", "%w"]
    assert [(node.op, node.operands) for node in parts.nodes][:3] == [
        ("mul", ["%x", "%x"]),
        ("sum", ["%square"]),
        ("div", ["%sum", "64.0"]),
    ]
    assert parts.nodes[1].dims == 1
    assert parts.outputs == ["%y"]
    for wrong, said in (("%1 = mul %0", "line 2: '%1 = mul %0' is no node"), ("inputs x", "'x' is no input")):
        with pytest.raises(InvalidGraph, match=re.escape(said)):
            split(f"inputs %0: f32[2]\n{wrong}")


def test_chapter_2_a_graph_is_built_and_verified_and_prints_as_it_was() -> None:
    graph = parse(NORM)
    assert str(parse(str(graph))) == str(graph)
    faults: Mapping[str, str] = {
        "%1 = add(%0, %9)": "line 2: %9 is not made before",
        "%1 = shout(%0)": "there is no op 'shout'",
        "%1 = sum(%0) over 3": "sum of 3 dimensions of f32[4, 8]",
        "%0 = neg(%0)": "%0 is made twice",
        "%1: f32[8] = neg(%0)": "%1 is said to be f32[8], and neg makes f32[4, 8]",
        "%1 = cast(%0)": "a cast needs the type",
        "%1 = add(%0, [3])": "'[3]' is neither a value nor a number",
        "%1 = add(%0)": "add takes 2 operands, got 1",
        "%1 = sum(2.0) over 1": "sum takes one value",
        "%1: f9[4] = neg(%0)": "there is no dtype 'f9'",
    }
    for line, said in faults.items():
        with pytest.raises(InvalidGraph, match=re.escape(said)):
            parse(f"inputs %0: f32[4, 8]\n{line}\noutputs %0")


def test_chapter_3_a_pass_rewrites_the_graph() -> None:
    """Common subexpressions are one, and what nothing takes goes."""
    graph = canonicalize(parse(NORM))
    assert [node.result.name for node in graph.nodes] == ["%square", "%sum", "%mean", "%root", "%scaled", "%y"]
    same = parse("inputs %0: f32[4]\n%1 = neg(%0)\n%2 = neg(%0)\n%3 = add(%1, %2)\noutputs %3")
    assert [node.operands[1].name for node in canonicalize(same).nodes[1:]] == ["%1"]  # type: ignore[union-attr]


def test_chapter_4_shapes_are_inferred_through_the_ops_interface() -> None:
    """The text names the types of its inputs alone."""
    made = {node.result.name: node.result.type for node in parse(NORM).nodes}
    assert made["%square"] == made["%y"] == TensorType((8, 64), torch.float32)
    assert made["%sum"] == made["%root"] == TensorType((8, 1), torch.float32)
    shapes = parse("inputs %0: bf16[3, 1, 5], %1: bf16[4, 1]\n%2 = mul(%0, %1)\n%3 = lt(%2, 0)\noutputs %3")
    assert [str(node.result.type) for node in shapes.nodes] == ["bf16[3, 4, 5]", "i1[3, 4, 5]"]
    with pytest.raises(InvalidGraph, match=re.escape("line 2: add of f32[3], f32[4]: the shapes do not fit")):
        parse("inputs %0: f32[3], %1: f32[4]\n%2 = add(%0, %1)\noutputs %2")


def test_chapter_5_a_part_is_lowered_and_the_rest_stays() -> None:
    """What fuses becomes linalg on tensors; a node alone stays an op of the graph."""
    text = NORM.replace("outputs %y", "%flip = neg(%w)\noutputs %y, %flip")
    graph = fuse(canonicalize(parse(text)))
    assert sorted(node.op for node in graph.nodes) == ["fused", "neg"]
    [fused] = [node for node in graph.nodes if node.op == "fused"]
    kernel = kernel_text(fused)
    assert kernel.text.count("linalg.generic") == 6
    assert [name for name in ("arith.mulf", "arith.divf", "math.sqrt") if name not in kernel.text] == []


@pytest.mark.skipif(bool(mlir.available()), reason="needs the bindings of MLIR")
def test_chapter_6_llvm_and_machine_code_compute_what_the_text_says() -> None:
    pytest.importorskip("llvmlite")
    graph = fuse(canonicalize(parse(NORM)))
    stages: dict[str, str] = {}
    llvm = lower(kernel_text(graph.nodes[0]), stages.__setitem__)
    assert list(stages)[-1] == "llvm"
    assert "define" in llvm
    assert "linalg" not in llvm
    x, w = torch.randn(8, 64), torch.randn(64)
    torch.testing.assert_close(CompiledProgram(graph)(x, w)[0], norm(x, w))


@st.composite
def texts(draw: st.DrawFn) -> str:
    lines, shapes = ["inputs %0: f32[3, 4], %1: f32[4]"], [(3, 4), (4,)]
    for at in range(2, draw(st.integers(3, 9))):
        op = draw(
            st.sampled_from([*(name for name in POINTWISE if POINTWISE[name].arity == 2), "neg", "exp", *REDUCTIONS])
        )
        first = draw(st.integers(0, len(shapes) - 1))
        if op in REDUCTIONS:
            dims = draw(st.integers(1, len(shapes[first])))
            lines.append(f"%{at} = {op}(%{first}) over {dims}")
            shapes.append(shapes[first][:-dims] + (1,) * dims)
        elif POINTWISE[op].compares:
            lines.append(f"%{at} = neg(%{first})")
            shapes.append(shapes[first])
        else:
            second = draw(
                st.one_of(st.integers(0, len(shapes) - 1).map(lambda n: f"%{n}"), st.sampled_from(["0.5", "-inf"]))
            )
            taken = f"%{first}" if POINTWISE[op].arity == 1 else f"%{first}, {second}"
            lines.append(f"%{at} = {op}({taken})")
            named = [shapes[int(each[1:])] for each in taken.split(", ") if each.startswith("%")]
            shapes.append(tuple(torch.broadcast_shapes(*named)))
    return "\n".join([*lines, f"outputs %{len(shapes) - 1}"])


def computed(graph: OpGraph, inputs: list[torch.Tensor]) -> torch.Tensor:
    values = dict(zip(graph.inputs, inputs, strict=True))
    for node in graph.nodes:
        values[node.result] = plain(node, values)
    return values[graph.outputs[0]]


@settings(max_examples=60, deadline=None)
@given(texts())
def test_drawn_texts_print_and_compute_the_same_behind_each_pass(text: str) -> None:
    graph = parse(text)
    assert str(parse(str(graph))) == str(graph)
    inputs = [torch.linspace(-2, 2, 12).view(3, 4), torch.linspace(1, -1, 4)]
    want = computed(graph, inputs)
    for each in (canonicalize(graph), fuse(canonicalize(graph))):
        torch.testing.assert_close(computed(each, inputs), want, equal_nan=True)
        assert graph.outputs[0].type == TensorType(tuple(want.shape), want.dtype)
