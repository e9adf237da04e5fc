"""Tiles a product as its schedule says, and reads from the tiled text what the mapping to hardware needs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ridgeline.compiler.graph import InvalidGraph
from ridgeline.compiler.mlir import MlirModule

S = TypeVar("S")


@dataclass(frozen=True)
class EpilogueValue:
    """An input of the epilogue. argument: its place among the operation's. input: its place among the kernel's, behind
    the two matrices. axes: which of rows (0) and columns (1) it has. dtype: as MLIR says it."""

    argument: int
    input: int
    axes: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class SumEpilogue:
    """The operations on each sum. sum: the argument that is the sum. arguments: their names. operations: each result
    with its text. constants: name to number and type. result: what is written."""

    inputs: tuple[EpilogueValue, ...]
    sum: int
    arguments: tuple[str, ...]
    constants: dict[str, tuple[str, str]]
    operations: tuple[tuple[str, str], ...]
    result: str


@dataclass(frozen=True)
class TiledProduct(Generic[S]):
    """m, n, k: sizes. left_by_k, right_by_k: whether K runs along a matrix's rows. dtype: of the result. schedule: what
    is annotated. epilogue: None where the sums are written as they are."""

    m: int
    n: int
    k: int
    left_by_k: bool
    right_by_k: bool
    dtype: str
    schedule: S
    epilogue: SumEpilogue | None


@dataclass(frozen=True)
class NeededTile:
    """The tile that a schedule leaves of a product. sizes: its m, n and k. blocks: those of what it is cut from.
    mapped: names of hardware to which a loop is mapped where m, n or k is more than so many."""

    sizes: tuple[int, int, int]
    blocks: tuple[int, int, int]
    mapped: tuple[tuple[str, str, int], ...] = ()


Annotated = Callable[[dict[str, list[int]]], tuple[S, NeededTile]]  # a schedule of the numbers it annotated


def tiled(text: str, annotated: Annotated[S], told: Callable[[str, str], None] | None = None) -> TiledProduct[S]:
    """Return a product, as linalg says it, tiled by the script of the transform dialect that stands behind it.

    annotated: makes a schedule of its annotations, and says what it leaves. Raises InvalidGraph if the script leaves
    something else."""
    module = MlirModule(text)
    module.run("func.func(linalg-fuse-elementwise-ops),canonicalize,cse")
    if told is not None:
        told("fused", str(module))
    module.run("transform-interpreter,canonicalize,cse")
    module.drop_modules()
    if told is not None:
        told("tiled", str(module))
    return read(str(module), annotated)


def read(text: str, annotated: Annotated[S]) -> TiledProduct[S]:
    """Return the product that a tiled product's text is of. Raises InvalidGraph."""
    maps = dict(re.findall(r"^(#map\d*) = affine_map<(.*)>$", text, re.M))
    (said,) = _found(r"linalg\.matmul (?:indexing_maps = \[([^\]]*)\] )?(?:\{[^}]*\} )?ins", text, "a product")
    left, right = [maps[each] for each in said.split(", ")[:2]] if said else ("(d0, d2)", "(d2, d1)")
    head = _found(r"func\.func @product\((.*)\) -> tensor<(\d+)x(\d+)x(\w+)>", text, "a function @product")
    arguments = re.findall(r"(%\w+): tensor<([\dx]*?)x?(bf16|f16|f32)>", head[0])
    shapes = [tuple(map(int, filter(None, shape.split("x")))) for _, shape, _ in arguments]
    left_by_k, right_by_k = left.endswith("(d0, d2)"), right.endswith("(d1, d2)")
    sizes = {"m": int(head[1]), "n": int(head[2]), "k": shapes[0][1 if left_by_k else 0]}
    numbers = {name: _numbers(value) for name, value in re.findall(r"ridgeline\.(\w+) = (array<[^>]*>|[^,}]+)", text)}
    try:
        schedule, needed = annotated(numbers)
    except KeyError as error:
        raise InvalidGraph(f"the schedule does not annotate the product with ridgeline.{error.args[0]}.") from error
    _check_tile(text, sizes, left_by_k, needed)
    names = [name for name, _, _ in arguments]
    m, n, k = sizes.values()
    return TiledProduct(m, n, k, left_by_k, right_by_k, head[3], schedule, _epilogue(text, maps, names))


def _check_tile(text: str, sizes: dict[str, int], left_by_k: bool, needed: NeededTile) -> None:
    """Raise InvalidGraph if the innermost product is not a tile of these sizes, or what is left over of one."""
    pattern = (
        r"linalg\.matmul .*ins\([^:]* : tensor<([\d?]+)x([\d?]+)x\w+>.* outs\(%\w+ : tensor<([\d?]+)x([\d?]+)xf32>"
    )
    first, second, m, n = _found(pattern, text, "a product of tensors")
    there = (m, n, second if left_by_k else first)
    for name, found, wanted, block in zip("mnk", there, needed.sizes, needed.blocks, strict=True):
        whole = str(min(wanted, sizes[name]))
        if found != whole and not (found == "?" and (sizes[name] % wanted or sizes[name] % block)):
            raise InvalidGraph(f"the innermost product has {name} = {found}, and the schedule says {whole}.")
    for mapping, name, size in needed.mapped:
        if sizes[name] > size and mapping not in text:
            raise InvalidGraph(f"no loop is mapped to {mapping}.")


def _numbers(value: str) -> list[int]:
    return [int(each) for each in re.findall(r"-?\d+", value.replace("i64", ""))]


def _found(pattern: str, text: str, what: str) -> tuple[str, ...]:
    found = re.search(pattern, text)
    if found is None:
        raise InvalidGraph(f"the text has not {what}.")
    return found.groups()


def _epilogue(text: str, maps: dict[str, str], names: list[str]) -> SumEpilogue | None:
    if "linalg.generic" not in text:
        return None
    head = re.search(
        r"linalg\.generic \{indexing_maps = \[([^\]]*)\].*?\} ins\(([^:]*) : ([^)]*)\) outs.*?\{\n\s*\^bb0\((.*)\):\n"
        r"((?:.*\n)*?)\s*linalg\.yield (%\w+) : (\w+)",
        text,
    )
    if head is None:
        raise InvalidGraph("the text has no epilogue behind the product.")
    places, operands = head[1].split(", "), head[2].split(", ")
    arguments = tuple(name for name, _ in re.findall(r"(%\w+): (\w+)", head[4]))
    types = [type for _, type in re.findall(r"(%\w+): (\w+)", head[4])]
    inputs, sum_at = [], -1
    for at, operand in enumerate(operands):
        source = _source(operand, text)
        if source not in names:
            sum_at = at
            continue
        target = maps[places[at]].split(" -> ")[1]
        axes = tuple(int(each) for each in re.findall(r"d(\d)", target))
        inputs.append(EpilogueValue(at, names.index(source) - 2, axes, types[at]))
    operations = re.findall(r"(%\w+) = (.*)", head[5])
    made = {*arguments, *(result for result, _ in operations)}
    constants = {}
    for name in {each for _, line in operations for each in re.findall(r"%\w+", line)} - made:
        number, type = _found(rf"{name} = arith\.constant (\S+) : (\w+)", text, f"the constant {name}")
        constants[name] = (number, type)
    return SumEpilogue(tuple(inputs), sum_at, arguments, constants, tuple(operations), head[6])


def _source(name: str, text: str) -> str:
    """Return the function's argument that a slice is of, or the name."""
    found = re.search(rf"{name} = tensor\.extract_slice (%\w+)\[", text)
    return found[1] if found else name
