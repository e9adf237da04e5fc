"""The cuts of products with 8-bit weights on Hopper that a sweep tries, and the library's product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from ridgeline.kernels.base.case import Cuts
from ridgeline.kernels.gemm.fp8 import choose, library
from ridgeline.kernels.gemm.fp8.choose import Tiles
from ridgeline.kernels.gemm.fp8.eight import Eight
from ridgeline.kernels.gemm.fp8.op import Fp8
from ridgeline.kernels.gemm.fp8.products import rounded_linear
from ridgeline.kernels.gemm.fp8.rounding import round_rows
from ridgeline.kernels.gemm.fp8.triton import eight
from ridgeline.kernels.gemm.plain.cases import ProductCase
from ridgeline.kernels.gemm.plain.choose import RING, Stream, power_of_two
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.small.activation.triton import gated_activation

PROCESSORS = 132  # of an H200, for whose numbers of tiles these are worth a try


@dataclass(frozen=True)
class Library:
    """torch's own product of the same numbers."""

    scaled: bool = True


Plan = Stream | Tiles | Library


def candidates(case: ProductCase) -> list[Plan]:
    """Return the chosen cut, then others that might be faster, for the shapes that the kernels take."""
    gated, form = case.gated, case.form
    outputs = case.out_width // (2 if gated else 1)
    if case.in_width < 256 or case.in_width % 16 or outputs % 16 or not form:
        return []
    found: list[Plan] = list(_plans(case.tokens, case.in_width, outputs, form, gated=gated))
    if case.tokens > 1 and form in ("token", "int8"):
        found.append(Library())
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
    if isinstance(cut, Library):
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


OP_CUTS = {
    "fp8_linear": Cuts(candidates, partial(with_cut, _linear)),
    "fp8_norm_linear": Cuts(candidates, partial(with_cut, _norm_linear)),
}
