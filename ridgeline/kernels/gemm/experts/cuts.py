"""The cuts of the experts' kernels that a sweep tries: those for Hopper, then the portable ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from ridgeline.kernels.base.case import Cuts, Tuning, as_cases
from ridgeline.kernels.base.routing import UNGATED
from ridgeline.kernels.base.tuned import ShapeClass
from ridgeline.kernels.base.weight_format import CodedFormat, Fp8Format
from ridgeline.kernels.gemm.codes.op import MXFP4, MXFP8
from ridgeline.kernels.gemm.experts import hopper, hopper_plans, hopper_rows, triton
from ridgeline.kernels.gemm.experts.cases import GPT_OSS_MXFP4, QWEN3, DownCase, ExpertsCase, GateUpCase
from ridgeline.kernels.gemm.experts.choose import (
    Rows,
    SharedRows,
    Tiles,
    Widened,
    choose_down,
    choose_gate_up,
    choose_shared,
)
from ridgeline.kernels.gemm.experts.hopper_plans import Stream, choose_mxfp8, coded, stream
from ridgeline.kernels.gemm.experts.matrices import Matrices, arranged, shape_of
from ridgeline.kernels.gemm.plain.choose import power_of_two
from ridgeline.kernels.gemm.plain.predict import H200, IN_FLIGHT, LAP, START

HopperTiles = hopper_plans.Tiles
NARROWEST = 128  # inputs and outputs, at least: what the kernels for Hopper are written for
FEW_TOKENS, TILE_TOKENS = 8, range(4, 65)  # more than rows.py can win with; those for which each tile is tried
SHARED = 227_000  # bytes of shared memory that a program on Hopper takes


def candidates(case: GateUpCase | DownCase) -> list[Any]:
    """Return cuts for a case, those that may be the best for so many pairs of each expert."""
    gated = isinstance(case, GateUpCase)
    inputs, average = case.width if gated else case.inner, case.tokens * case.used / case.experts
    wide = min(case.width, case.inner) >= NARROWEST and case.gate not in UNGATED
    found: list[Any] = []
    if case.format is None:
        shared = not gated and choose_shared(case.tokens, case.inner, case.used, 2) is not None
        found = [SharedRows(rows) for rows in (1, 2, 4)] if shared and wide else []
        found += [*(_plain(inputs, average, gated=gated) if wide else ()), *_portable(case, gated=gated)]
    elif case.format == MXFP8 and wide:
        found = _mxfp8(case, inputs, average, gated=gated)
    elif case.format == MXFP4 and wide:
        found = _codes(average, gated=gated)
    elif isinstance(case.format, CodedFormat) and case.format.values == "levels" and wide:
        found = [*_apart(average, gated=gated)]
    elif isinstance(case.format, Fp8Format) and wide:
        found = _fp8(case, inputs, average, gated=gated)
    return list(dict.fromkeys(found))


def _plain(inputs: int, average: float, *, gated: bool) -> Iterator[Stream | HopperTiles]:
    block = 64 if gated else 128
    for rows, tokens, narrow, each, resident in (
        (64, 16, 8, block, 1), (64, 32, 8, block, 1), (64, 64, 16, block, 1), (64, 128, 32, block, 1),
        (64, 16, 8, block, 2), (64, 32, 16, block, 2), (128, 16, 8, 64, 1), (128, 64, 16, 64, 1),
    ):  # fmt: skip
        if average / 4 <= tokens <= max(32, 8 * average) and average <= 130:
            yield stream(rows, tokens, narrow, each, inputs, gated=gated, resident=resident)
    if average >= 24:
        yield HopperTiles()


def _fp8(case: GateUpCase | DownCase, inputs: int, average: float, *, gated: bool) -> list[Any]:
    found: list[Any] = []
    if case.tokens <= FEW_TOKENS:
        found += [Rows(2, 1024 if inputs % 1024 == 0 else 256, 4)]
    if average <= 48:
        held = 16 if average <= 8 else 64
        found += [
            stream(64, held, max(8, held // 4), block, inputs, gated=gated, resident=some, itemsize=1)
            for block in ((128,) if gated else (128, 256))
            for some in (1, 2)
        ]
    if average > 8:
        found += [HopperTiles(6, 128) if getattr(case.format, "block", False) else HopperTiles()]
    return found


def _mxfp8(case: ExpertsCase, inputs: int, average: float, *, gated: bool) -> list[Any]:
    found: list[Any] = [choose_mxfp8(case.tokens * case.used, case.experts, inputs, gated=gated)]
    if case.tokens <= FEW_TOKENS:
        found += [Rows(2, 1024 if inputs % 1024 == 0 else 256, 4)]
    for held in (16, 32, 64):
        if average / 4 <= held <= max(32, 8 * average):
            found.append(stream(64, held, max(8, held // 4), 128, inputs, gated=gated, itemsize=1))
    return [*found, Widened()] if average >= 16 else found


def _codes(average: float, *, gated: bool) -> list[Any]:
    cuts = [(64, 16, 8, 1), (128, 16, 8, 1)] if average <= 16 else []
    cuts += [(64, 32, 16, 2), (64, 64, 32, 1), (128, 64, 32, 1)] if 4 <= average <= 64 else []
    cuts += [(64, 128, 64, 1), (128, 64, 32, 1)] if average > 32 else []
    found: list[Any] = [coded(rows, held, narrow, gated=gated, resident=some) for rows, held, narrow, some in cuts]
    found += _apart(average, gated=gated)
    return [*found, Widened()] if average >= 128 else found


def _apart(average: float, *, gated: bool) -> Iterator[Stream]:
    """Yield cuts in which single warps multiply codes."""
    for rows, held, resident in (
        (64, 16, 3), (64, 16, 4), (128, 16, 3), (128, 16, 4), (64, 32, 2), (64, 32, 3), (128, 32, 2), (128, 32, 3),
        (64, 64, 2), (128, 64, 2),
    ):  # fmt: skip
        sums = rows * held * (2 if gated else 1) // 128  # registers of a thread
        if sums <= {2: 64, 3: 32, 4: 16}[resident] and average / 4 <= held <= max(32, 8 * average):
            yield coded(rows, held, held // 2, gated=gated, resident=resident, apart=True)


def _portable(case: GateUpCase | DownCase, *, gated: bool) -> Iterator[Rows | Tiles]:
    """Yield the chosen cut, then others: rows for few tokens, tiles that shared memory and registers hold."""
    tokens, sizes = case.tokens, (case.width, case.inner) if gated else (case.inner, case.width)
    rows = tokens <= FEW_TOKENS and case.gate not in UNGATED
    chosen = (choose_gate_up if gated else choose_down)(tokens, *sizes, experts=case.experts, used=case.used)
    if rows or isinstance(chosen, Tiles):
        yield chosen
    if rows:
        block, together = max(256, power_of_two(sizes[0])), 2 if gated else power_of_two(case.used)
        for number, warps in itertools.product((1, 2, 4, 8), (1, 2, 4, 8)):
            if 32 * 8 * warps <= together * number * block <= 128 * 32 * warps:
                yield Rows(number, block, warps)
    for height, held, block, stages, warps in itertools.product(
        (64, 128), (16, 32, 64, 128), (64, 128), (3, 4), (4, 8)
    ):
        fits = (height + held) * block * 2 * stages <= SHARED and height * held <= 64 * 32 * warps
        if tokens in TILE_TOKENS and fits and held <= 4 * tokens:
            yield Tiles(height, held, block, warps, stages)


def with_cut(name: str, cut: Any) -> Callable[..., Any]:
    module = hopper_rows if isinstance(cut, SharedRows) else hopper
    return partial(getattr(module if isinstance(cut, Stream | HopperTiles | SharedRows) else triton, name), plan=cut)


def prepared(case: GateUpCase | DownCase, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with matrices in the order that an engine holds them in."""
    x, weight, *rest = given
    return x, _arranged(weight, x.dtype, 2 if isinstance(rest[-1], str) else 1), *rest


def _arranged(weight: Matrices, dtype: Any, parts: int) -> Matrices:
    if isinstance(weight, tuple):
        return arranged(weight, dtype, (shape_of(weight)[1] // parts,) * parts)
    return weight


def cost(case: ExpertsCase, cut: Any) -> float:
    """Return the seconds of a cut for Hopper by a model, without combining pairs."""
    gated = isinstance(case, GateUpCase)
    parts, (inputs, outputs) = (2, (case.width, case.inner)) if gated else (1, (case.inner, case.width))
    pairs, reached, size = case.tokens * case.used, max(1.0, case.reached), case.weight_itemsize(2)
    each = pairs / reached  # pairs of an expert that has some
    rate = H200.matrix * (2 if case.format is not None and size >= 1 else 1)
    if isinstance(cut, HopperTiles):
        tiles = reached * math.ceil(each / 128) * math.ceil(outputs * parts / cut.rows)
        laps = math.ceil(tiles / H200.processors)
        return 2 * START + laps * 2 * 128 * cut.rows * inputs / (0.8 * rate / H200.processors)
    columns = cut.narrow if each <= cut.narrow / 1.5 else cut.tokens
    tiles = reached * math.ceil(each / cut.tokens) * math.ceil(outputs / cut.rows)
    flight = min(1.0, cut.stages * cut.resident * cut.rows * parts * cut.block * size / IN_FLIGHT)
    read = reached * outputs * parts * inputs * size / (H200.memory * flight)
    gathered = tiles * inputs * columns * 2 / H200.cache
    codes = 2.5 if size < 1 and not cut.apart else 1.0  # numbers are made of codes
    multiplied = codes * tiles * 2 * cut.rows * parts * max(columns, 16) * inputs / (0.7 * rate)
    ends = tiles / (H200.processors * cut.resident) * LAP
    return START + max(read, multiplied) + gathered + ends


def shape(case: ExpertsCase) -> ShapeClass:
    """Return the class of a case, for `hopper._plan`."""
    gated = isinstance(case, GateUpCase)
    inputs, outputs = (case.width, case.inner) if gated else (case.inner, case.width)
    return hopper_plans.class_of(_form(case), case.tokens * case.used, case.experts, inputs, outputs, gated=gated)


def _form(case: ExpertsCase) -> str:
    if isinstance(case.format, Fp8Format):
        return "fp8 blocks" if case.format.block else "fp8"
    if isinstance(case.format, CodedFormat):
        return "mxfp8" if case.format == MXFP8 else case.format.values
    return ""


def _tuning(kind: type[Any]) -> Tuning:
    cases = [replace(model, tokens=tokens) for model in (QWEN3, GPT_OSS_MXFP4, GRANITE) for tokens in TUNED_TOKENS]
    cases += [replace(QWEN3, tokens=tokens, format=Fp8Format(activations="block", block=True)) for tokens in (8, 64)]

    def drawn(random: Random) -> Any:
        """Return any number of tokens of the experts of a class, or of others of small mixtures."""
        tokens, widths = random.randint(8, 512), (128 * random.randint(8, 32), 128 * random.randint(4, 16))
        other = ExpertsCase(tokens, *widths, experts=random.choice((16, 32, 64, 128)), used=random.choice((2, 4, 8)))
        model = replace(random.choice((QWEN3, GPT_OSS_MXFP4, GRANITE)), tokens=tokens)
        return as_cases(kind, [random.choice((model, other))])[0]

    return Tuning(as_cases(kind, cases), shape, drawn, (Stream, HopperTiles))


TUNED_TOKENS = (8, 16, 64, 256)
GRANITE = ExpertsCase(1, 1536, 512, experts=40, used=8)
OP_CUTS = {
    name: Cuts(
        candidates, partial(with_cut, name), interpreted=(Rows, Tiles), prepared=prepared, cost=cost,
        tuning=_tuning(kind),
    )
    for name, kind in (("grouped_gate_up", GateUpCase), ("grouped_down", DownCase))
}  # fmt: skip
