"""Ops that multiply with weights, with their cases, as the kernel benchmark needs them.

The cases are those of the tests and, for machines with enough memory, the shapes of real models (`REAL`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ridgeline.core.cost import Cost
from ridgeline.core.expert_spec import RoutingSpec
from ridgeline.core.weight_format import SUPER, Fp8Format
from ridgeline.kernels.coded_gemm import cases as coded_cases
from ridgeline.kernels.coded_gemm import op as coded
from ridgeline.kernels.coded_gemm.cases import CodedCase
from ridgeline.kernels.fp8_gemm import cases as fp8_cases
from ridgeline.kernels.fp8_gemm import op as fp8
from ridgeline.kernels.fp8_gemm.cases import Fp8Case
from ridgeline.kernels.fp8_gemm.cost import fp8_linear_cost, fp8_norm_linear_cost
from ridgeline.kernels.gemm import cases as gemm_cases
from ridgeline.kernels.gemm import op as gemm
from ridgeline.kernels.gemm.cases import LinearCase, NormLinearCase
from ridgeline.kernels.gemm.cost import linear_cost, norm_linear_cost
from ridgeline.kernels.grouped_gemm import cases as grouped_cases
from ridgeline.kernels.grouped_gemm import op as grouped
from ridgeline.kernels.grouped_gemm.cases import ExpertsCase
from ridgeline.kernels.grouped_gemm.cost import grouped_down_cost, grouped_gate_up_cost, touched
from ridgeline.kernels.int8_gemm import cases as int8_cases
from ridgeline.kernels.int8_gemm import op as int8
from ridgeline.kernels.int8_gemm.cases import Int8Case
from ridgeline.kernels.int8_gemm.cost import int8_linear_cost
from ridgeline.kernels.op import Op
from ridgeline.kernels.route import cases as route_cases
from ridgeline.kernels.route import op as route
from ridgeline.kernels.route.cases import RouteCase
from ridgeline.kernels.route.cost import route_cost, to_some_cost

# These ops are limited by the rate of the matrix units too, and the others by memory alone.
MATRIX_OPS = (
    "linear",
    "norm_linear",
    "int8_linear",
    "fp8_linear",
    "fp8_norm_linear",
    "coded_linear",
    "coded_norm_linear",
    "grouped_gate_up",
    "grouped_down",
    "paged_attention",
    "decode_attention",
    "latent_attention",
    "expanded_attention",
    "gated_delta",
    "delta_attention",
    "linear_attention",
    "ssd",
)

# (inputs, outputs) of qkv, output, gate_up and down projections of an 8B model, gate_up of a 1B model
PROJECTIONS = ((4096, 6144), (4096, 4096), (4096, 28_672), (14_336, 4096), (2048, 16_384))

# (width, inner width, experts, used experts) of Qwen3-30B-A3B and Mixtral-8x7B
MIXTURES = ((2048, 768, 128, 8), (4096, 14_336, 8, 2))

REAL: Mapping[str, Sequence[Any]] = {
    "linear": [LinearCase(t, i, o) for i, o in PROJECTIONS for t in (1, 8, 64, 256, 8192)]
    + [LinearCase(t, 4096, 128_256) for t in (1, 64)],
    "norm_linear": [
        NormLinearCase(t, i, o, gate="silu") for i, o in ((4096, 14_336), (1024, 3072)) for t in (1, 8, 64)
    ],
    "int8_linear": [Int8Case(t, i, o) for i, o in PROJECTIONS for t in (1, 8, 64)],
    "fp8": [
        Fp8Case(t, i, o, how)
        for i, o in PROJECTIONS
        for how in (fp8.BY_TOKEN, fp8.IN_BLOCKS)
        for t in (1, 8, 64, 256, 8192)
    ],
    "coded": [
        CodedCase(t, i, o, how) for i, o in PROJECTIONS for how in (coded.W4, coded.Q4_K) for t in (1, 8, 64, 256, 8192)
    ],
    "route": [
        RouteCase(t, m, RoutingSpec(experts=e, top_k=k, renormalize=True), exact=True)
        for m, _, e, k in MIXTURES
        for t in (1, 8, 64, 256, 8192)
    ],
    "grouped": [ExpertsCase(t, m, f, experts=e, used=k) for m, f, e, k in MIXTURES for t in (1, 8, 64, 256, 8192)],
}


@dataclass(frozen=True)
class Subject:
    """One op on one case. `slack` is the absolute error that float32 sums may leave, in units of 2**-24 (see
    tests/kernels). `stores`: the op returns nothing, and stores its result in its first argument."""

    op: Op
    label: str
    inputs: Callable[[torch.dtype, torch.device], tuple]
    cost: Callable[[int], Cost]  # bytes per element → least work
    slack: int = 16
    epsilons: int = 4  # in units of the dtype's: an implementation may round an intermediate besides its result
    options: Mapping[str, Any] = field(default_factory=dict)
    stores: bool = False


def chosen(more: Mapping[str, Sequence[Any]], name: str, own: Sequence[Any]) -> list[Any]:
    """Return an op's own cases, then more by its name."""
    return [*own, *more.get(name, ())]


def of_weights(*, real: bool = False) -> Iterator[Subject]:
    """Yield the ops' own cases, followed by those of real models if wanted."""
    cases = partial(chosen, REAL if real else {})
    for c in cases("linear", gemm_cases.CASES):
        label = f"{c.tokens}x{c.out_width}x{c.in_width}" + (" bias" if c.bias else "")
        yield Subject(gemm.LINEAR, label, c.inputs, _linear(c), slack=c.in_width)
    for c in cases("norm_linear", gemm_cases.NORM_CASES):
        label = f"{c.tokens}x{c.out_width}x{c.in_width} {c.gate or ''}".rstrip() + (" bias" if c.bias else "")
        yield Subject(gemm.NORM_LINEAR, label, c.inputs, _norm_linear(c), slack=16 * c.in_width, epsilons=16)
    for c in cases("int8_linear", int8_cases.CASES):
        label = f"{c.tokens}x{c.out_width}x{c.in_width}" + (" bias" if c.bias else "")
        yield Subject(int8.INT8_LINEAR, label, c.inputs, _int8_linear(c), slack=c.in_width)
    for c in cases("fp8", fp8_cases.CASES):
        yield from _fp8(c)
    for c in cases("coded", coded_cases.CASES):
        yield from _coded(c)
    for c in cases("route", [replace(c, exact=True) for c in route_cases.CASES]):
        yield Subject(route.ROUTE, _route_label(c), c.inputs, _route(c), slack=4 * c.width)
        yield Subject(route.ROUTE_TO_SOME, _route_label(c), c.routes, _to_some(c))
    for c in cases("grouped", [c for c in grouped_cases.CASES if not c.dead]):
        label = f"{c.tokens}x{c.used} of {c.experts} {c.width}x{c.inner}"
        yield Subject(grouped.GROUPED_GATE_UP, label, c.gate_up_inputs, _gate_up(c), slack=16 * c.width, epsilons=32)
        yield Subject(grouped.GROUPED_DOWN, label, c.down_inputs, _down(c), slack=c.inner, epsilons=8)


def _linear(c: LinearCase) -> Callable[[int], Cost]:
    return lambda item: linear_cost(c.tokens, c.in_width, c.out_width, itemsize=item, bias=c.bias)


def _int8_linear(c: Int8Case) -> Callable[[int], Cost]:
    return lambda item: int8_linear_cost(c.tokens, c.in_width, c.out_width, itemsize=item, bias=c.bias)


def _fp8(c: Fp8Case) -> Iterator[Subject]:
    """Yield the op alone, and with a norm and a gate.

    An implementation may leave activations unrounded. Rounding moves a result by up to 1 / 28 of its standard deviation
    in the mean square, and one in millions by six times that.
    """
    how: Fp8Format = c.format
    slack = c.in_width if how.activations is None else 1 << 22
    shape: Any = {"format": how, "bias": c.bias}
    label = f"{c.tokens}x{c.out_width}x{c.in_width} " + ("blocks" if how.block else str(how.activations))
    yield Subject(
        fp8.FP8_LINEAR, label + (" bias" if c.bias else ""), c.inputs,
        lambda item: fp8_linear_cost(c.tokens, c.in_width, c.out_width, itemsize=item, **shape), slack=slack,
    )  # fmt: skip
    yield Subject(
        fp8.FP8_NORM_LINEAR, label + " silu", _normed(c.inputs),
        lambda item: fp8_norm_linear_cost(
            c.tokens, c.in_width, c.out_width // 2, itemsize=item, gate="silu", **shape
        ), slack=2 * slack, epsilons=32,
    )  # fmt: skip


def _coded(c: CodedCase) -> Iterator[Subject]:
    """Yield the op alone, and with a norm and a gate. The weight is counted as the file has it.

    An implementation may round activations to int8, some dozens at a time. Their step is then about 1 / 60 of their
    standard deviation, which moves a result by 0.005 to 0.01 in the mean square, and one in millions by six times that.
    """
    how = f"{c.format.bits} bits, {c.format.values}, {c.format.zeros}" + (" nested" if c.format.nested else "")
    label = f"{c.tokens}x{c.out_width}x{c.in_width} {how}"
    shape: Any = {"weight_itemsize": _coded_itemsize(c), "bias": c.bias}
    yield Subject(
        coded.CODED_LINEAR, label + (" bias" if c.bias else ""), c.inputs,
        lambda item: linear_cost(c.tokens, c.in_width, c.out_width, itemsize=item, **shape), slack=1 << 20,
    )  # fmt: skip
    yield Subject(
        coded.CODED_NORM_LINEAR, label + " silu", _normed(c.inputs),
        lambda item: norm_linear_cost(
            c.tokens, c.in_width, c.out_width // 2, itemsize=item, gate="silu", **shape
        ), slack=1 << 21, epsilons=32,
    )  # fmt: skip


def _coded_itemsize(c: CodedCase) -> float:
    """Return the bytes of a weight with its share of scales, zeros and minima."""
    minimum = c.format.zeros == "minimum"
    scale = 1 if c.format.nested else c.scales.itemsize
    zero = scale if minimum else c.format.zeros == "levels"
    outer = 2 * (1 + minimum) / SUPER if c.format.nested else 0
    return c.format.bits / 8 + (scale + zero) / (c.format.group or c.in_width) + outer


def _normed(inputs: Callable[[torch.dtype, torch.device], tuple]) -> Callable[[torch.dtype, torch.device], tuple]:
    """Return the function that makes the arguments of the op with a norm and a gate, of those of the op alone."""

    def made(dtype: torch.dtype, device: torch.device) -> tuple:
        x_TI, weight, bias_O = inputs(dtype, device)
        norm_I = torch.linspace(0.5, 1.5, x_TI.shape[1], device=device).to(dtype)
        return x_TI, x_TI.flip(0), norm_I, 1e-5, weight, bias_O, "silu"

    return made


def _norm_linear(c: NormLinearCase) -> Callable[[int], Cost]:
    shape: Any = {"bias": c.bias, "residual": c.residual, "gate": c.gate}
    return lambda item: norm_linear_cost(c.tokens, c.in_width, c.out_width, itemsize=item, **shape)


def _route(c: RouteCase) -> Callable[[int], Cost]:
    shape: Any = {"residual": c.residual, "norm": c.norm}
    return lambda item: route_cost(c.tokens, c.width, c.how.experts, c.how.top_k, itemsize=item, **shape)


def _to_some(c: RouteCase) -> Callable[[int], Cost]:
    return lambda _: to_some_cost(c.tokens, c.how.experts // 2, c.how.top_k)


def _route_label(c: RouteCase) -> str:
    return f"{c.tokens}x{c.width} to {c.how.top_k} of {c.how.experts} {c.how.score}"


def _gate_up(c: ExpertsCase) -> Callable[[int], Cost]:
    shape: Any = {"used": c.used, "reached": touched(c.tokens, c.experts, c.used), "kind": c.gate, "bias": c.bias}
    return lambda item: grouped_gate_up_cost(c.tokens, c.width, c.inner, itemsize=item, **shape)


def _down(c: ExpertsCase) -> Callable[[int], Cost]:
    shape: Any = {"used": c.used, "reached": touched(c.tokens, c.experts, c.used), "bias": c.bias, "add": c.add}
    return lambda item: grouped_down_cost(c.tokens, c.inner, c.width, itemsize=item, **shape)
