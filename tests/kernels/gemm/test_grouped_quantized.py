"""Experts' products with matrices in FP8 and in codes, against float64 products of the dequantized matrices.

An output is a sum of I terms whose weights an implementation may round to the dtype of x once or twice, and the result
once more; the first op multiplies two of them. So errors, relative to the outputs' norm, stay below 4 epsilons' halves.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.base.weight_format import CodedFormat, Fp8Format
from ridgeline.kernels.gemm.codes.op import MXFP4, MXFP8, NF4, NVFP4, Q4_K, W4, W4_ZEROS
from ridgeline.kernels.gemm.experts import choose, forms, torch_ops
from ridgeline.kernels.gemm.experts.cases import ExpertsCase
from ridgeline.kernels.gemm.experts.choose import Rows, Tiles, Widened
from ridgeline.kernels.gemm.experts.matrices import part, shape_of
from ridgeline.kernels.gemm.experts.op import GROUPED_DOWN, GROUPED_GATE_UP
from ridgeline.kernels.small.activation.op import gated_activation

pytest.importorskip("triton")

from ridgeline.kernels.gemm.experts import quantized

CPU = torch.device("cpu")
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
CHANNELS, BLOCKS = Fp8Format(activations=None), Fp8Format(block=True, activations=None)
GPT_OSS, E8M0, E4M3 = "swiglu_clamped", torch.uint8, torch.float8_e4m3fn
SMALL = (
    ExpertsCase(2, 64, 64, experts=6, used=3, format=MXFP4, scales=E8M0, bias=True, gate=GPT_OSS, dead=1),
    ExpertsCase(3, 96, 160, experts=4, used=2, format=CHANNELS, add=True),
    ExpertsCase(1, 256, 128, experts=4, used=2, format=BLOCKS, bias=True),
    ExpertsCase(2, 128, 128, experts=5, used=2, format=W4_ZEROS, add=True),
    ExpertsCase(9, 192, 96, experts=5, used=2, format=MXFP4, scales=E8M0, bias=True, gate=GPT_OSS, dead=2, add=True),
    ExpertsCase(3, 64, 96, experts=5, used=2, format=MXFP8, scales=E8M0, bias=True, gate=GPT_OSS, dead=1),
    ExpertsCase(6, 160, 96, experts=4, used=2, format=MXFP8, scales=E8M0, add=True),
    ExpertsCase(7, 200, 136, experts=6, used=2, format=CHANNELS, skew=2.0),
    ExpertsCase(6, 256, 192, experts=3, used=2, format=BLOCKS, add=True),
    ExpertsCase(6, 256, 128, experts=4, used=2, format=W4, bias=True),
    ExpertsCase(5, 64, 64, experts=4, used=1, format=NVFP4, scales=E4M3),
    ExpertsCase(5, 96, 64, experts=4, used=1, format=CodedFormat(bits=4, group=0), scales=torch.bfloat16),
    ExpertsCase(5, 64, 128, experts=3, used=2, format=NF4, scales=torch.float32),  # no kernel reads it: it is widened
    ExpertsCase(2, 256, 256, experts=3, used=2, format=Q4_K, add=True),  # likewise
)
SHAPES = (
    ExpertsCase(1, 2880, 2880, experts=32, used=4, format=MXFP4, scales=E8M0, bias=True, gate=GPT_OSS),
    ExpertsCase(1, 2048, 768, experts=128, used=8, format=BLOCKS),
    ExpertsCase(1, 2048, 768, experts=128, used=8, format=CHANNELS),
    ExpertsCase(1, 4096, 14_336, experts=8, used=2, format=W4),
)
REAL = tuple(
    replace(case, tokens=tokens, dead=tokens // 5, add=tokens == 8)
    for case in SHAPES
    for tokens in (1, 4, 8, 64, 256, 3000)
)
WITH_DEVICES = [
    *(pytest.param(case, "cpu", marks=ON_CPU) for case in SMALL),
    *(pytest.param(case, "cuda", marks=pytest.mark.gpu) for case in (*SMALL, *REAL)),
]
DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
NAMES = ["triton", "batch_invariant"]


def exact_gate_up(x_TM: Tensor, weight, bias_EG: Tensor | None, routes, gate: str) -> Tensor:
    """The op in float64, from dequantized matrices."""
    inner = shape_of(weight)[1] // 2
    y_PF = torch.zeros(len(routes.token_P), inner, dtype=torch.float64, device=x_TM.device)
    start = routes.start_E1.tolist()
    for expert, (first, end) in enumerate(pairwise(start)):
        if first < end:
            matrix = part(weight, expert).dequantized().double()
            y_NG = x_TM[routes.token_P[first:end].long()].double() @ matrix.T
            if bias_EG is not None:
                y_NG += bias_EG[expert].double()
            y_PF[first:end] = gated_activation(y_NG, gate)
    return y_PF


def exact_down(h_PF: Tensor, weight, bias_EM: Tensor | None, routes, add_TM: Tensor | None) -> Tensor:
    """The op in float64, token by token."""
    width = shape_of(weight)[1]
    tokens, used = routes.expert_TK.shape
    y_TM = torch.zeros(tokens, width, dtype=torch.float64, device=h_PF.device)
    start = routes.start_E1.tolist()
    token_P, weight_P = routes.token_P.long(), torch.zeros(tokens * used, dtype=torch.float64, device=h_PF.device)
    weight_P[routes.place_TK.flatten().long()] = routes.weight_TK.flatten().double()
    for expert, (first, end) in enumerate(pairwise(start)):
        if first < end:
            y_NM = h_PF[first:end].double() @ part(weight, expert).dequantized().double().T
            if bias_EM is not None:
                y_NM += bias_EM[expert].double()
            y_TM.index_add_(0, token_P[first:end], y_NM * weight_P[first:end, None])
    return y_TM if add_TM is None else y_TM + add_TM.double()


def assert_close(got: Tensor, want: Tensor) -> None:
    error = (got.double() - want).norm() / want.norm()
    assert error < 2 * torch.finfo(got.dtype).eps, error  # NaN too


def check_gate_up(name: str, case: ExpertsCase, dtype: torch.dtype, device: str, **options: object) -> None:
    x_TM, weight, *rest = case.gate_up_inputs(dtype, torch.device(device))
    x_TM[case.tokens - case.dead :] = torch.nan  # tokens that go nowhere, so this must not matter
    computed = int(rest[1].start_E1[-1])
    y_PF = GROUPED_GATE_UP.choose(Platform.of(torch.device(device)), name)(x_TM, weight, *rest, **options)
    assert y_PF.dtype == dtype
    assert_close(y_PF[:computed], exact_gate_up(x_TM, weight, *rest)[:computed])


def check_down(name: str, case: ExpertsCase, dtype: torch.dtype, device: str, **options: object) -> None:
    h_PF, weight, *rest = case.down_inputs(dtype, torch.device(device))
    h_PF[int(rest[1].start_E1[-1]) :] = torch.nan  # rows of pairs that no kernel computed
    y_TM = GROUPED_DOWN.choose(Platform.of(torch.device(device)), name)(h_PF, weight, *rest, **options)
    assert y_TM.dtype == dtype
    assert_close(y_TM, exact_down(h_PF, weight, *rest))


@pytest.mark.few(12)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("case", "device"), WITH_DEVICES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_products_are_exact(name: str, case: ExpertsCase, device: str, dtype: torch.dtype) -> None:
    check_gate_up(name, case, dtype, device)
    check_down(name, case, dtype, device)


CUTS = (Rows(rows=4, block=256, warps=1), Tiles(32, 16, 32, 2, 2), Tiles(64, 32, 128, 4, 3))


def formats_and_cuts(first: CodedFormat | Fp8Format, *others: CodedFormat | Fp8Format) -> list[Any]:
    """All pairs. The other formats are multiplied by rows, which is slow to interpret, in `test_products_are_exact`."""
    slow = pytest.mark.thorough
    return [
        pytest.param(format, plan, marks=slow if format in others and isinstance(plan, Rows) else ())
        for format in (first, *others)
        for plan in CUTS
    ]


@pytest.mark.few(4)
@pytest.mark.parametrize(("format", "plan"), formats_and_cuts(MXFP4, CHANNELS, BLOCKS), ids=str)
def test_every_cut_multiplies(format: CodedFormat | Fp8Format, plan: Rows | Tiles) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = ExpertsCase(6, 160, 96, experts=5, used=3, bias=True, add=True, skew=2.0, dead=2, format=format, scales=E8M0)
    check_gate_up("triton", case, torch.float32, device, plan=plan)
    check_down("triton", case, torch.float32, device, plan=plan)


@pytest.mark.parametrize(("format", "plan"), formats_and_cuts(CHANNELS, BLOCKS), ids=str)
def test_numbers_that_the_gpu_converts_are_the_same(
    format: Fp8Format, plan: Rows | Tiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ExpertsCase(3, 160, 96, experts=3, used=2, bias=True, format=format)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = []
    for capability in ((8, 0), (9, 0)):
        monkeypatch.setattr(forms, "compute_capability", lambda device, known=capability: known)
        x_TM, weight, *rest = case.gate_up_inputs(torch.float32, torch.device(device))
        form = forms.form_of(weight)
        assert form is not None
        assert form.native == (capability == (9, 0))
        gate_up = GROUPED_GATE_UP.choose(Platform.of(torch.device(device)), "triton")
        results.append(gate_up(x_TM, weight, *rest, plan=plan))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


def test_matrices_widened_in_pieces_multiply_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr(quantized, "PIECE", 2 * 128 * 64 * 2)
    for format in (MXFP4, NF4, BLOCKS):
        case = ExpertsCase(
            9, 64, 64, experts=6, used=2, bias=True, format=format, scales=E8M0 if format is MXFP4 else torch.float32
        )
        weight, bias_EG, routes = case.gate_up_inputs(torch.float16, torch.device(device))[1:4]
        pieces = list(quantized.widened(weight, bias_EG, routes, torch.float32))
        assert len(pieces) > 1
        check_gate_up("triton", case, torch.float16, device, plan=Widened())
        check_down("triton", case, torch.float16, device, plan=Widened())


@pytest.mark.parametrize("format", [MXFP4, W4, Fp8Format(), Fp8Format(block=True, activations="block")], ids=str)
def test_torch_multiplies_as_the_reference(format: CodedFormat | Fp8Format) -> None:
    case = ExpertsCase(5, 128, 128, experts=4, used=2, bias=True, add=True, dead=1, format=format)
    if format is MXFP4:
        case = replace(case, scales=E8M0)
    first, second = case.gate_up_inputs(torch.float32, CPU), case.down_inputs(torch.float32, CPU)
    computed = int(first[3].start_E1[-1])
    torch.testing.assert_close(torch_ops.grouped_gate_up(*first), GROUPED_GATE_UP.reference(*first)[:computed])
    torch.testing.assert_close(torch_ops.grouped_down(*second), GROUPED_DOWN.reference(*second))


def test_every_cut_chosen_covers_its_rows() -> None:
    for inputs in (64, 200, 768, 2880, 4096, 14_336):
        for tokens in (1, 4, 5, 300):
            rows = choose.choose_quantized(tokens, inputs, 4096, together=4, experts=8, used=4, per_byte=2)
            assert isinstance(rows, Rows) == (tokens <= choose.ROWS_TOKENS)
            if isinstance(rows, Rows):
                assert all(size & (size - 1) == 0 for size in (rows.rows, rows.block, rows.warps))
