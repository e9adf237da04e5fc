"""Reads a graph from the text that it prints as, and infers the types that a text leaves out.

    inputs %0: f32[8, 64], %1: f32[64]
    %2 = mul(%0, %1)                          # a type may follow the name: `%2: f32[8, 64] = …`
    %3 = sum(%2) over 1
    %4: bf16[8, 64] = cast(%2)                # a cast's must
    outputs %3, %4

Calls of torch and bodies of fused nodes are printed and not read. What is read is verified.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ridgeline.compiler.graph import (
    GraphNode,
    GraphValue,
    InvalidGraph,
    Operand,
    OpGraph,
    TensorType,
    made_type,
    verify,
)
from ridgeline.compiler.ops import POINTWISE, REDUCTIONS, TAKEN

_TYPE = r"(\w+)\[([\d, ]*)\]"
_VALUE = re.compile(rf"(%\w+)\s*:\s*{_TYPE}")
_NODE = re.compile(rf"(%\w+)(?:\s*:\s*{_TYPE})?\s*=\s*(\w+)\((.*)\)(?:\s+over\s+(\d+))?")
DTYPES = {name: dtype for dtype, name in TAKEN.items()}


@dataclass
class NodeText:
    """One line: the name of what it makes, its type if the text has it, the op and what stands in brackets."""

    line: int
    name: str
    type: TensorType | None
    op: str
    operands: list[str]
    dims: int


@dataclass
class GraphText:
    """The text of a graph in its parts, of which nothing was checked yet."""

    inputs: list[tuple[str, TensorType]] = field(default_factory=list)
    nodes: list[NodeText] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)


def parse(text: str) -> OpGraph:
    """Return the graph of a text. Raise InvalidGraph, with the number of the line, for what is no graph."""
    return build(split(text))


def split(text: str) -> GraphText:
    """Return the parts of a text. Raise InvalidGraph for a line that is none."""
    found = GraphText()
    for number, line in _lines(text):
        word, _, rest = line.partition(" ")
        if word == "inputs":
            parts = [] if not rest.strip() else re.split(r",\s*(?=%)", rest.strip())
            for part in parts:
                if (value := _VALUE.fullmatch(part)) is None:
                    raise InvalidGraph(f"line {number}: {part!r} is no input; say `%0: f32[8, 64]`.")
                found.inputs.append((value[1], _type(value[2], value[3], number)))
        elif word == "outputs":
            found.outputs = [each.strip() for each in rest.split(",") if each.strip()]
        elif node := _NODE.fullmatch(line):
            type = _type(node[2], node[3], number) if node[2] else None
            operands = [each.strip() for each in node[5].split(",") if each.strip()]
            found.nodes.append(NodeText(number, node[1], type, node[4], operands, int(node[6] or 0)))
        else:
            raise InvalidGraph(f"line {number}: {line!r} is no node; say `%2 = mul(%0, %1)`.")
    return found


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if kept := line.partition("#")[0].strip():
            yield number, kept


def _type(element: str, sizes: str, line: int) -> TensorType:
    if element not in DTYPES:
        raise InvalidGraph(f"line {line}: there is no dtype {element!r}; there are {', '.join(DTYPES)}.")
    return TensorType(tuple(int(size) for size in sizes.split(",") if size.strip()), DTYPES[element])


def build(text: GraphText) -> OpGraph:
    """Return the graph of a text's parts, with the types that each op makes of its operands'. Raise InvalidGraph."""
    values: dict[str, GraphValue] = {}
    for name, type in text.inputs:
        values[name] = GraphValue(name, type)
    inputs, nodes = tuple(values.values()), []
    if len(inputs) < len(text.inputs):
        raise InvalidGraph("two inputs have one name.")
    for each in text.nodes:
        operands = tuple(_operand(word, values, each.line) for word in each.operands)
        result = GraphValue(each.name, _inferred(each, operands))
        nodes.append(GraphNode(each.op, operands, result, {"dims": each.dims} if each.dims else {}))
        values[each.name] = result
    return verify(OpGraph(inputs, tuple(nodes), tuple(_operand(word, values, 0) for word in text.outputs)))


def _operand(word: str, values: dict[str, GraphValue], line: int) -> Operand:
    """Return a value, or a number as Python writes it."""
    if word.startswith("%"):
        if word not in values:
            raise InvalidGraph(
                f"line {line}: {word} is not made before." if line else f"the output {word} is not made."
            )
        return values[word]
    try:
        number = float(word) if word in ("inf", "-inf", "nan") else ast.literal_eval(word)
    except (ValueError, SyntaxError) as error:
        raise InvalidGraph(f"line {line}: {word!r} is neither a value nor a number.") from error
    if not isinstance(number, bool | int | float):
        raise InvalidGraph(f"line {line}: {word!r} is neither a value nor a number.")
    return number


def _inferred(node: NodeText, operands: tuple[Operand, ...]) -> TensorType:
    """Return the type that an op makes; the one interface that all ops have for it is `made_type`."""
    if node.op == "cast":
        if node.type is None:
            raise InvalidGraph(f"line {node.line}: a cast needs the type that it makes.")
        return node.type
    if node.op not in POINTWISE and node.op not in REDUCTIONS:
        raise InvalidGraph(
            f"line {node.line}: there is no op {node.op!r}; there are {', '.join([*POINTWISE, *REDUCTIONS])}."
        )
    if node.op in REDUCTIONS and (len(operands) != 1 or not isinstance(operands[0], GraphValue)):
        raise InvalidGraph(f"line {node.line}: {node.op} takes one value.")
    try:
        made = made_type(node.op, operands, node.dims)
    except InvalidGraph as error:
        raise InvalidGraph(f"line {node.line}: {error}") from error
    if node.type is not None and node.type != made:
        raise InvalidGraph(f"line {node.line}: {node.name} is said to be {node.type}, and {node.op} makes {made}.")
    return made
