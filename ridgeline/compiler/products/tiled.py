"""Tiles a product as its schedule says, and reads from the tiled text what the mapping to hardware needs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.compiler.graph import InvalidGraph
from ridgeline.compiler.mlir import MlirModule
from ridgeline.compiler.products.schedule import STEP, HopperSchedule


@dataclass(frozen=True)
class EpilogueValue:
    """An input of the epilogue. argument: its place among the operation's. input: its place among the kernel's, behind
    the two matrices. axes: which of rows (0) and columns (1) it has. dtype: as MLIR says it."""

    argument: int
    input: int
    axes: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Epilogue:
    """What is computed of each sum. sum: the argument that is the sum. arguments: their names. operations: each result
    with its text. constants: name to number and type. result: what is written."""

    inputs: tuple[EpilogueValue, ...]
    sum: int
    arguments: tuple[str, ...]
    constants: dict[str, tuple[str, str]]
    operations: tuple[tuple[str, str], ...]
    result: str


@dataclass(frozen=True)
class TiledProduct:
    """m, n, k: sizes. left_by_k, right_by_k: whether K runs along a matrix's rows. dtype: of the result."""

    m: int
    n: int
    k: int
    left_by_k: bool
    right_by_k: bool
    dtype: str
    schedule: HopperSchedule
    epilogue: Epilogue


def tiled(text: str, script: str, told: Callable[[str, str], None] | None = None) -> TiledProduct:
    """Return a product, as linalg says it, tiled by a script of the transform dialect. Raises InvalidGraph if what the
    script leaves is not a product in blocks, steps of K and warpgroups."""
    module = MlirModule(f"{text}\n{script}")
    module.run("func.func(linalg-fuse-elementwise-ops),canonicalize,cse")
    if told is not None:
        told("fused", str(module))
    module.run("transform-interpreter,canonicalize,cse")
    module.drop_modules()
    if told is not None:
        told("tiled", str(module))
    return read(str(module))


def read(text: str) -> TiledProduct:
    """Return what a tiled product's text says. Raises InvalidGraph."""
    maps = dict(re.findall(r"^(#map\d*) = affine_map<(.*)>$", text, re.M))
    (said,) = _found(r"linalg\.matmul (?:indexing_maps = \[([^\]]*)\] )?(?:\{[^}]*\} )?ins", text, "a product")
    left, right = [maps[each] for each in said.split(", ")[:2]] if said else ("(d0, d2)", "(d2, d1)")
    head = _found(r"func\.func @product\((.*)\) -> tensor<(\d+)x(\d+)x(\w+)>", text, "a function @product")
    arguments = re.findall(r"(%\w+): tensor<([\dx]*?)x?(bf16|f16|f32)>", head[0])
    shapes = [tuple(map(int, filter(None, shape.split("x")))) for _, shape, _ in arguments]
    left_by_k, right_by_k = left.endswith("(d0, d2)"), right.endswith("(d1, d2)")
    m, n = int(head[1]), int(head[2])
    k = shapes[0][1 if left_by_k else 0]
    numbers = {name: value for name, value in re.findall(r"(ridgeline\.\w+) = ([^,}]+(?:, \d+>)?)", text)}
    schedule = _schedule(numbers)
    loops = {  # one of a single turn is not there any more
        rf"step %c{STEP}\b": k > STEP,
        r"mapping = \[#gpu\.block<y>, #gpu\.block<x>\]": m > schedule.rows or n > schedule.columns,
        r"mapping = \[#gpu\.warpgroup<x>\]": m > schedule.rows // schedule.warpgroups,
    }
    for loop, needed in loops.items():
        if needed:
            _found(f"({loop})", text, f"a loop with {loop}")
    names = [name for name, _, _ in arguments]
    return TiledProduct(m, n, k, left_by_k, right_by_k, head[3], schedule.checked(), _epilogue(text, maps, names))


def _schedule(numbers: dict[str, str]) -> HopperSchedule:
    def of(name: str) -> list[int]:
        if f"ridgeline.{name}" not in numbers:
            raise InvalidGraph(f"the schedule does not say ridgeline.{name}.")
        value = numbers[f"ridgeline.{name}"]
        return [int(each) for each in re.findall(r"\d+", value.replace("i64", ""))]

    (rows, columns), cluster = of("block"), of("cluster")
    rest = {name: of(name)[0] for name in ("warpgroups", "stages", "raster", "blocks", "staging", "running")}
    return HopperSchedule(rows=rows, columns=columns, cluster=(cluster[0], cluster[1]), **rest)


def _found(pattern: str, text: str, what: str) -> tuple[str, ...]:
    found = re.search(pattern, text)
    if found is None:
        raise InvalidGraph(f"the text has not {what}.")
    return found.groups()


def _epilogue(text: str, maps: dict[str, str], names: list[str]) -> Epilogue:
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
    operations = [tuple(line.strip().split(" = ", 1)) for line in head[5].splitlines() if line.strip()]
    made = {*arguments, *(result for result, _ in operations)}
    constants = {}
    for name in {each for _, line in operations for each in re.findall(r"%\w+", line)} - made:
        number, type = _found(rf"{name} = arith\.constant (\S+) : (\w+)", text, f"the constant {name}")
        constants[name] = (number, type)
    return Epilogue(tuple(inputs), sum_at, arguments, constants, tuple(operations), head[6])  # type: ignore[arg-type]


def _source(name: str, text: str) -> str:
    """Return the function's argument that a slice is of, or the name."""
    found = re.search(rf"{name} = tensor\.extract_slice (%\w+)\[", text)
    return found[1] if found else name
