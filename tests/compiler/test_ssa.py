"""Single assignment: dominance beside networkx's, liveness by walking, and programs that compute the same."""

from __future__ import annotations

from collections.abc import Iterator

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.compiler.ssa import (
    FlowBlock,
    FlowInstruction,
    FlowProgram,
    InvalidFlow,
    PhiNode,
    dominance_frontiers,
    immediate_dominators,
    live_at_entry,
    phi_places,
    run,
    single_assignment,
    written_twice,
)

OPS = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "copy": lambda a: a, "less": lambda a, b: float(a < b)}
VARIABLES = "xyz"


@st.composite
def programs(draw: st.DrawFn) -> FlowProgram:
    """Programs of up to seven blocks with any jumps, loops included, that write three variables."""
    names = [f"b{n}" for n in range(draw(st.integers(1, 7)))]
    operand = st.one_of(st.sampled_from(VARIABLES), st.integers(-2, 2).map(float))
    blocks = {}
    for name in names:
        instructions = [
            FlowInstruction(
                draw(st.sampled_from(VARIABLES)),
                draw(st.sampled_from(["add", "sub", "less"])),
                (draw(operand), draw(operand)),
            )
            for _ in range(draw(st.integers(0, 3)))
        ]
        targets = draw(st.lists(st.sampled_from(names[1:]), max_size=2)) if names[1:] else []
        condition = draw(st.sampled_from(VARIABLES)) if len(targets) == 2 else ""
        result = "" if targets else draw(st.sampled_from(VARIABLES))
        blocks[name] = FlowBlock(tuple(instructions), tuple(targets), condition, result)
    return FlowProgram(blocks)


def as_networkx(program: FlowProgram) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_node(program.entry)
    graph.add_edges_from((name, to) for name in program.reached() for to in program.blocks[name].targets)
    return graph


@settings(max_examples=150, deadline=None)
@given(programs())
def test_dominance_is_that_of_networkx(program: FlowProgram) -> None:
    graph = as_networkx(program)
    theirs = {
        name: over for name, over in nx.immediate_dominators(graph, program.entry).items() if name != program.entry
    }
    assert immediate_dominators(program) == theirs
    assert dominance_frontiers(program) == nx.dominance_frontiers(graph, program.entry)


def ways(program: FlowProgram, name: str, seen: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """Ways from a block on, through each block once."""
    targets = [to for to in program.blocks[name].targets if to not in seen]
    yield [name]
    for to in targets:
        for way in ways(program, to, (*seen, to)):
            yield [name, *way]


@settings(max_examples=100, deadline=None)
@given(programs())
def test_a_variable_is_live_where_some_way_reads_it_before_a_write(program: FlowProgram) -> None:
    live = live_at_entry(program)
    for name in program.reached():
        read: set[str] = set()
        for way in ways(program, name):
            written: set[str] = set()
            for at in way:
                block = program.blocks[at]
                for each in block.instructions:
                    read |= each.reads - written
                    written.add(each.target)
                read |= {block.condition, block.result} - written - {""}
        assert live[name] == read


@settings(max_examples=200, deadline=None)
@given(programs(), st.tuples(*[st.integers(-3, 3)] * 3))
def test_programs_in_single_assignment_compute_the_same(program: FlowProgram, numbers: tuple[int, ...]) -> None:
    made = single_assignment(program)
    assert written_twice(made) == []
    assert list(made.blocks) == program.reached()
    values = dict(zip(VARIABLES, map(float, numbers), strict=True))
    entering = {f"{name}.0": value for name, value in values.items()}
    assert run(made, entering, OPS, 60) == run(program, values, OPS, 60)
    before = program.predecessors()
    assert all(set(phi.sources) == set(before[name]) for name, block in made.blocks.items() for phi in block.phis)


def test_a_loop_gets_a_phi_of_what_it_changes_and_of_nothing_else() -> None:
    """x = 0; while x < n: x = x + 1; give x. `t` is written in the loop and read there alone."""
    loop = FlowProgram({
        "entry": FlowBlock((FlowInstruction("x", "copy", (0.0,)),), ("head",)),
        "head": FlowBlock((FlowInstruction("t", "less", ("x", "n")),), ("body", "end"), "t"),
        "body": FlowBlock((FlowInstruction("x", "add", ("x", 1.0)),), ("head",)),
        "end": FlowBlock(result="x"),
        "nowhere": FlowBlock((FlowInstruction("x", "copy", (9.0,)),), ("head",)),
    })  # fmt: skip
    assert immediate_dominators(loop) == {"head": "entry", "body": "head", "end": "head"}
    assert dominance_frontiers(loop)["body"] == {"head"}
    assert live_at_entry(loop) == {"entry": {"n"}, "head": {"x", "n"}, "body": {"x", "n"}, "end": {"x"}}
    assert phi_places(loop) == {"entry": [], "head": ["x"], "body": [], "end": []}
    made = single_assignment(loop)
    assert made.blocks["head"].phis == (PhiNode("x.2", {"entry": "x.1", "body": "x.3"}),)
    assert made.blocks["body"].instructions == (FlowInstruction("x.3", "add", ("x.2", 1.0)),)
    assert "nowhere" not in made.blocks
    assert run(made, {"n.0": 5.0}, OPS) == 5.0


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ({}, "at least one block"),
        ({"a": FlowBlock(targets=("b",))}, "'a' jumps to 'b', which is no block"),
        ({"a": FlowBlock(), "b": FlowBlock(targets=("a",))}, "'b' jumps to 'a'"),
        ({"a": FlowBlock(targets=("b", "b")), "b": FlowBlock()}, "jumps to 2 blocks"),
        ({"a": FlowBlock(targets=("b",), condition="x"), "b": FlowBlock()}, "jumps to 1 blocks"),
    ],
)
def test_jumps_that_do_not_fit_are_refused(blocks: dict[str, FlowBlock], said: str) -> None:
    with pytest.raises(InvalidFlow, match=said):
        FlowProgram(blocks)
