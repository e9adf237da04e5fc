"""The cuts of products with 8-bit weights on Hopper that a sweep tries, and the library's product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from torch import Tensor

from ridgeline.kernels.base.case import Cuts, Tuning
from ridgeline.kernels.base.tuned import ShapeClass
from ridgeline.kernels.base.weight_format import Fp8Format
from ridgeline.kernels.gemm.fp8 import choose, library
from ridgeline.kernels.gemm.fp8.cases import Fp8Case, Fp8NormCase
from ridgeline.kernels.gemm.fp8.choose import Tiles
from ridgeline.kernels.gemm.fp8.eight import Eight
from ridgeline.kernels.gemm.fp8.op import Fp8
from ridgeline.kernels.gemm.fp8.products import rounded_linear
from ridgeline.kernels.gemm.fp8.rounding import round_rows
from ridgeline.kernels.gemm.fp8.triton import eight
from ridgeline.kernels.gemm.plain.cases import ProductCase
from ridgeline.kernels.gemm.plain.choose import RING, LibraryProduct, Stream, power_of_two
from ridgeline.kernels.gemm.plain.cuts import drawn_widths
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.gemm.plain.predict import H200, ProductShape, stream_seconds
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.small.activation.triton import gated_activation

TILES_START, LIBRARY_START = 3.0e-6, 4.0e-6  # seconds of a launch
PROCESSORS = 132  # of an H200, for whose numbers of tiles these are worth a try


Plan = Stream | Tiles | LibraryProduct


def candidates(case: ProductCase) -> list[Plan]:
    """Return the chosen cut, then others that might be faster, for the shapes that the kernels take."""
    gated, form = case.gated, case.form
    outputs = case.out_width // (2 if gated else 1)
    if case.in_width < 256 or case.in_width % 16 or outputs % 16 or not form:
        return []
    found: list[Plan] = list(_plans(case.tokens, case.in_width, outputs, form, gated=gated))
    if case.tokens > 1 and form in ("token", "int8"):
        found.append(LibraryProduct())
    return list(dict.fromkeys(found))


def _plans(tokens: int, inputs: int, outputs: int, form: str, *, gated: bool) -> Iterator[Stream | Tiles]:
    blocked, fed = form == "block", form == "fed"
    yield choose.choose_hopper(
        tokens, inputs, outputs, gated=gated, processors=PROCESSORS, blocked=blocked, between=fed
    )
    if fed and not gated and tokens <= 64:
        # A tile of 128 rows has all outputs of a scale, so its end could round for the op behind
        yield Stream(128, max(16, power_of_two(tokens)), 256, 5 if tokens <= 32 else 4, 4)
    if tokens in (1, 8) and form in ("token", "fed") and not gated:
        # Boxes with fewer rows beyond the last token; half as many barriers
        split = 2 if inputs > 8192 else 1
        for columns, block in ((8, 256), (8, 512), (16, 512)):
            yield Stream(64, columns, block, RING // ((64 + columns) * block), split)
    if tokens in (1, 8) and form in ("token", "fed") and gated:
        yield Stream(128, 8, 128, 6)
    if tokens <= 64:
        yield from _streams(tokens, inputs, outputs, form, gated=gated)
    elif tokens <= 512:
        if not fed:
            yield Tiles(6, promote=True) if blocked else Tiles()
        for rows, columns in ((64, 64), (64, 128), (128, 128)) if gated else ((64, 128), (128, 128), (64, 256)):
            if columns > tokens or (form != "token" and columns == 256) or (blocked and gated and columns == 128):
                continue
            tiles = -(-outputs // rows) * -(-tokens // columns)
            yield choose.stream(rows, columns, inputs, tiles, gated=gated, processors=PROCESSORS, long=not gated)
    if (tokens >= 256 and blocked) or (tokens >= 1024 and form == "token"):
        yield from (Tiles(4, promote=True, tokens=256), Tiles(6, promote=True))


def _streams(tokens: int, inputs: int, outputs: int, form: str, *, gated: bool) -> Iterator[Stream]:
    most = max(16, power_of_two(tokens))
    for rows in (64, 128):
        for columns in {most, max(16, most // 2)}:
            tiles = -(-outputs // rows) * -(-tokens // columns)
            for long in (False, True):
                plan = choose.stream(
                    rows, columns, inputs, tiles, gated=gated, processors=PROCESSORS, long=long and not gated
                )
                yield plan
                if form == "token" and tokens == 64:
                    yield replace(plan, promote=True)


def product(cut: Plan, x: Rounded, weight: Eight, epilogue: Epilogue = Epilogue()) -> Tensor:
    """Return the product of rounded activations with a cut."""
    if isinstance(cut, LibraryProduct):
        y_TO = library.product(x, weight, epilogue.bias_O)
        return gated_activation(y_TO, epilogue.gate) if epilogue.gate else y_TO
    return rounded_linear(x, weight, epilogue.bias_O, epilogue.gate, cut, epilogue.buffer)


def rounded(x: Operand, weight: Eight) -> tuple[Rounded, Tensor]:
    return round_rows(x, weight.number_OI.dtype, weight.activations or "token", weight.x_scale)


def _linear(x: Tensor | Rounded, weight: Fp8, bias_O: Tensor | None, *, cut: Plan) -> Tensor:
    ours = eight(weight)
    return product(cut, x if isinstance(x, Rounded) else rounded(Operand(x), ours)[0], ours, Epilogue(bias_O))


def _norm_linear(x: Operand, weight: Fp8, epilogue: Epilogue, *, cut: Plan) -> tuple[Tensor, Tensor]:
    ours = eight(weight)
    n, s_TI = rounded(x, ours)
    return product(cut, n, ours, epilogue), s_TI


def with_cut(function: Callable[..., Any], cut: Plan) -> Callable[..., Any]:
    return partial(function, cut=cut)


def product_of(case: ProductCase) -> ProductShape:
    return ProductShape(case.tokens, case.in_width, case.out_width // (2 if case.gated else 1), case.gated, 1)


def cost(case: ProductCase, cut: Plan) -> float:
    """Return the seconds of a cut by the model, without the rounding of activations, which all of them need."""
    of = product_of(case)
    if isinstance(cut, Stream):
        return stream_seconds(cut, of, promote=case.form == "block")
    if isinstance(cut, Tiles):
        rows, columns = (128 if cut.promote else 256) // of.parts, cut.tokens
        laps = -(-(-(-of.outputs // rows) * -(-of.tokens // columns)) // H200.processors)
        return TILES_START + laps * 2 * rows * of.parts * columns * of.inputs / (1.6 * H200.matrix / H200.processors)
    return LIBRARY_START + max(of.weight / H200.memory / 0.8, 2 * of.tokens * of.weight / (1.4 * H200.matrix))


def shape(case: ProductCase) -> ShapeClass:
    """Return the class of a case, for `products._chosen`."""
    blocked, fed = bool(getattr(case.format, "block", False)), case.form == "fed"  # type: ignore[attr-defined]
    return choose.class_of(product_of(case), blocked=blocked, between=fed and (not blocked or case.gated))


TUNED_TOKENS = (1, 8, 32, 64, 128, 256)
WIDTHS, GATED = ((4096, 4096), (14_336, 4096), (8192, 1024)), ((2048, 8192), (4096, 14_336))
FORMATS = (Fp8Format(), Fp8Format(activations="block", block=True))


def drawn(random: Random) -> Fp8Case:
    """Return a product of any number of tokens, with widths of a class or with others of small models."""
    sizes = random.choice((random.choice(WIDTHS), drawn_widths(random)))
    return Fp8Case(random.randint(1, 256), *sizes, random.choice(FORMATS))


def drawn_gated(random: Random) -> Fp8NormCase:
    """Return one with a norm before and a gate behind."""
    inputs, outputs = random.choice((random.choice(GATED), drawn_widths(random)))
    return Fp8NormCase(random.randint(1, 256), inputs, 2 * outputs, random.choice(FORMATS), gate="silu")


OP_CUTS = {
    "fp8_linear": Cuts(
        candidates, partial(with_cut, _linear), cost=cost,
        tuning=Tuning(
            [Fp8Case(t, i, o, how) for i, o in WIDTHS for how in FORMATS for t in TUNED_TOKENS],
            shape, drawn, (Stream, Tiles),
        ),
    ),
    "fp8_norm_linear": Cuts(
        candidates, partial(with_cut, _norm_linear), cost=cost,
        tuning=Tuning(
            [Fp8NormCase(t, i, 2 * o, how, gate="silu") for i, o in GATED for how in FORMATS for t in TUNED_TOKENS],
            shape, drawn_gated, (Stream, Tiles),
        ),
    ),
}  # fmt: skip
