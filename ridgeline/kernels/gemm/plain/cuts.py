"""The cuts of products with plain weights that a sweep tries on Hopper, and the library's product."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

from torch import Tensor

from ridgeline.kernels.base.case import Cuts, Tuning
from ridgeline.kernels.base.tuned import ShapeClass
from ridgeline.kernels.gemm.plain.cases import LinearCase, NormLinearCase
from ridgeline.kernels.gemm.plain.choose import RING, STREAM_TOKENS, LibraryProduct, RowsPlan, Stream, power_of_two
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.gemm.plain.predict import H200, ProductShape, class_of, rows_seconds, stream_seconds
from ridgeline.kernels.gemm.plain.triton import by_library, launch_rows
from ridgeline.kernels.small.activation.triton import gated_activation
from ridgeline.kernels.small.norm.triton import rms_norm

ROWS_TOKENS = 4  # up to which these are worth a try
NARROWEST = 256  # inputs, at least
LAUNCH = 2.0e-6  # seconds of a kernel beside the product, for a norm or a gate
LIBRARY_START = 3.0e-6  # seconds of the library's product beside its bytes and FLOPs


Try = RowsPlan | Stream | LibraryProduct
Case = LinearCase | NormLinearCase


def product_of(case: Case) -> ProductShape:
    return ProductShape(case.tokens, case.in_width, case.out_width, _gate(case) is not None)


def _gate(case: Case) -> str | None:
    return case.gate if isinstance(case, NormLinearCase) else None


def candidates(case: Case) -> list[Try]:
    """Return cuts that registers and shared memory hold."""
    of = product_of(case)
    if of.inputs < NARROWEST or of.inputs % 8 or of.outputs < 64 or of.tokens > STREAM_TOKENS:
        return []
    rows = _rows(of) if of.tokens <= ROWS_TOKENS else ()
    return [*dict.fromkeys((*rows, *streams(of))), LibraryProduct()]


def _rows(of: ProductShape) -> Iterator[RowsPlan]:
    whole, tokens = max(256, power_of_two(of.inputs)), power_of_two(of.tokens)
    for rows, warps in itertools.product((1, 2, 4, 8), (1, 2, 4, 8)):
        if whole <= 8192:
            yield from (RowsPlan(rows, tokens, whole, warps, programs=each) for each in (0, 2, 3, 4, 6))
        for block, depth in itertools.product((1024, 2048), (2, 3, 4, 8)):
            if block < of.inputs and depth * block <= of.inputs:
                yield RowsPlan(rows, tokens, block, warps, depth)


def streams(of: ProductShape, blocks: Sequence[int] = (64, 128)) -> Iterator[Stream]:
    """Yield cuts of hopper/stream.py with as many stages as fit."""
    if of.inputs % (16 // of.itemsize):
        return
    most = max(16, power_of_two(of.tokens))
    for rows, columns, block, split in itertools.product((64, 128), (most, most // 2), blocks, (1, 2, 4, 8)):
        stage = (rows * of.parts + columns) * block * of.itemsize
        programs = -(-of.outputs // rows) * -(-of.tokens // columns)
        sums = rows * of.parts * columns // (rows * 2)  # float32 registers of a thread
        if columns not in range(16, 257) or sums > 128 or block * split * 2 > of.inputs:
            continue
        if split == 1 or programs * split <= 2 * H200.processors:
            stages = min(RING // stage, 16, max(2, -(-of.inputs // (block * split))))
            if stages >= 2:
                yield Stream(rows, columns, block, stages, split)


def cost(case: Case, cut: Try) -> float:
    """Return the seconds of a cut by the model, with the kernels beside it."""
    of, norm = product_of(case), isinstance(case, NormLinearCase) and case.norm
    if isinstance(cut, RowsPlan):
        return rows_seconds(cut, of, norm=norm)
    beside = LAUNCH if norm else 0.0
    if isinstance(cut, Stream):
        return beside + stream_seconds(cut, of)
    library = of.weight / H200.memory + 2 * of.tokens * of.weight / of.itemsize / H200.matrix
    return beside + LIBRARY_START + library + (LAUNCH if of.gated else 0.0)


def _norm_linear(x: Operand, weight: Tensor, epilogue: Epilogue, *, cut: Try) -> tuple[Tensor, Tensor]:
    """Multiply with a cut, with all that a model launches then."""
    from ridgeline.kernels.gemm.plain.hopper import launch_stream  # Gluon

    if isinstance(cut, RowsPlan):
        return launch_rows(cut, x, weight, epilogue)
    n_TI = s_TI = x.x_TI
    if x.norm_weight_I is not None:
        n_TI, s_TI = rms_norm(x.x_TI, x.residual_TI, x.norm_weight_I, x.eps)
    bias_O, gate, *_ = epilogue
    if isinstance(cut, Stream):
        return launch_stream(cut, n_TI, weight, bias_O, gate), s_TI
    y_TO = by_library(n_TI, weight, bias_O)
    return (gated_activation(y_TO, gate) if gate else y_TO), s_TI


def _linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *, cut: Try) -> Tensor:
    return _norm_linear(Operand(x_TI), weight_OI, Epilogue(bias_O), cut=cut)[0]


def with_cut(function: Callable[..., Any], cut: Try) -> Callable[..., Any]:
    return partial(function, cut=cut)


# (inputs, outputs) of projections of models with 0.6 to 14 billion parameters, without and with a norm before
WIDTHS = ((2048, 2048), (4096, 4096), (4096, 6144), (8192, 2048), (14_336, 4096))
NORMED = ((1024, 3072, "silu"), (2048, 8192, "silu"), (4096, 14_336, "silu"), (4096, 6144, None))
KINDS = (RowsPlan, Stream, LibraryProduct)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def shape(case: Case) -> ShapeClass:
    """Return the class of a case, for `triton._plan`."""
    return class_of(product_of(case), norm=isinstance(case, NormLinearCase) and case.norm)


def drawn(random: Random) -> LinearCase:
    """Return a product of any number of tokens, with widths of a class or with others of small models."""
    tokens = random.choice((1, 2, 3, 4)) if random.random() < 0.3 else random.randint(5, 256)
    return LinearCase(tokens, *random.choice((random.choice(WIDTHS), drawn_widths(random))))


def drawn_widths(random: Random) -> tuple[int, int]:
    """Return inputs and outputs that a model of up to some 14 billion parameters might have."""
    return 128 * random.randint(6, 112), 128 * random.randint(6, 112)


def drawn_normed(random: Random) -> NormLinearCase:
    """Return one behind a norm, half of them gated."""
    inputs, outputs = drawn_widths(random)
    other = min(inputs, 8192), outputs, random.choice((None, "silu"))
    inputs, outputs, gate = random.choice((random.choice(NORMED), other))
    return NormLinearCase(drawn(random).tokens, inputs, outputs, gate=gate)


OP_CUTS = {
    "linear": Cuts(
        candidates, partial(with_cut, _linear), interpreted=(RowsPlan,), cost=cost,
        tuning=Tuning([LinearCase(t, *sizes) for sizes in WIDTHS for t in TOKENS], shape, drawn, KINDS),
    ),
    "norm_linear": Cuts(
        candidates, partial(with_cut, _norm_linear), interpreted=(RowsPlan,), cost=cost,
        tuning=Tuning(
            [NormLinearCase(t, i, o, gate=g) for i, o, g in NORMED for t in TOKENS], shape, drawn_normed, KINDS
        ),
    ),
}  # fmt: skip
