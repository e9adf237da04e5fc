"""Linear maps: every cut of both kernels against the reference, not only the one that would be chosen.

Tolerances: 4 epsilons of the dtype (the result's rounding and an intermediate's), to which a product of I terms of
order one adds I · 2**-24 for float32 sums. Where x is rounded before the product (normalised, times its weight), that
adds I roundings whose errors average out: their sum has a standard deviation of ε/√3 · |y| ~ ε, so 8 ε covers six;
a gated pair multiplies two such values of up to about four.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.gemm.plain.cases import CASES, NORM_CASES, LinearCase, NormLinearCase
from ridgeline.kernels.gemm.plain.choose import RowsPlan, Tiles, choose
from ridgeline.kernels.gemm.plain.cost import norm_linear_cost
from ridgeline.kernels.gemm.plain.op import LINEAR, NORM_LINEAR, Epilogue, Operand
from ridgeline.kernels.small.norm.op import rms_norm
from tests.covering import by_pairs

triton = pytest.importorskip("triton")

from ridgeline.kernels.gemm.plain import triton as implementation  # noqa: E402

CPU = torch.device("cpu")
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALF_DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]  # the interpreter is slow
CUTS = [
    RowsPlan(rows=1, tokens=1, block=256, warps=1),
    RowsPlan(rows=2, tokens=4, block=1024, warps=4),
    RowsPlan(rows=4, tokens=2, block=512, warps=2),
    RowsPlan(rows=2, tokens=2, block=256, warps=1, depth=3),
    RowsPlan(rows=4, tokens=1, block=1024, warps=4, programs=2),
    RowsPlan(rows=2, tokens=2, block=1024, warps=2, programs=1),
    Tiles(rows=16, tokens=16, block=64, stages=3, warps=4),
    Tiles(rows=64, tokens=16, block=128, stages=4, warps=4),
    Tiles(rows=16, tokens=32, block=32, stages=2, warps=2, split=3),
    Tiles(rows=128, tokens=64, block=64, stages=3, warps=8, split=2),
]
ROOM = 4


def assert_close(got: Tensor, want: Tensor, inputs: int, epsilons: int = 4) -> None:
    assert got.dtype == want.dtype
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), want.double(), rtol=4 * eps, atol=epsilons * eps + 4 * inputs * 2.0**-24)


def whole_rows(cut: RowsPlan, inputs: int) -> RowsPlan:
    """`cut`, or with a block that holds whole rows where its programs go around."""
    return replace(cut, block=max(cut.block, 1 << (inputs - 1).bit_length())) if cut.programs else cut


def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN: what a kernel leaves unwritten, or reads before writing, shows."""
    empty = torch.empty

    def nan(*shape: int, **options: object) -> Tensor:
        fresh = empty(*shape, **options)
        return fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh

    monkeypatch.setattr(torch, "empty", nan)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c.in_width * c.out_width < 70_000], ids=str)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_cut_multiplies(
    cut: RowsPlan | Tiles, case: LinearCase, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.tokens > cut.tokens:
        case = replace(case, tokens=cut.tokens)
    x_TI, weight_OI, bias_O = case.inputs(dtype, torch.device(device))
    expected = LINEAR.reference(x_TI, weight_OI, bias_O)
    poisoned(monkeypatch)
    if isinstance(cut, RowsPlan):
        y_TO, _ = implementation.launch_rows(whole_rows(cut, case.in_width), Operand(x_TI), weight_OI, Epilogue(bias_O))
    else:
        y_TO = implementation.launch_tiles(cut, x_TI, weight_OI, bias_O, None)
    assert_close(y_TO, expected, case.in_width)


@pytest.mark.few(36)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("cut", "case"),
    [
        pytest.param(cut, case, marks=() if (i + j) % 2 == 0 else pytest.mark.thorough)
        for i, cut in enumerate(CUTS)
        for j, case in enumerate(NORM_CASES)
    ],
    ids=str,
)
def test_every_cut_normalises_or_gates(
    cut: RowsPlan | Tiles, case: NormLinearCase, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.tokens > cut.tokens:
        case = replace(case, tokens=cut.tokens)
    x, weight_OI, epilogue = case.inputs(dtype, torch.device(device))
    expected, expected_s = NORM_LINEAR.reference(x, weight_OI, epilogue)
    poisoned(monkeypatch)
    if isinstance(cut, RowsPlan):
        if x.norm_weight_I is None:  # without a norm it adds nothing up
            x = Operand(expected_s)
        y_TO, s_TI = implementation.launch_rows(whole_rows(cut, case.in_width), x, weight_OI, epilogue)
        assert_close(s_TI, expected_s, 1)
    else:
        n_TI = expected_s if x.norm_weight_I is None else rms_norm(*x)[0]
        y_TO = implementation.launch_tiles(cut, n_TI, weight_OI, epilogue.bias_O, epilogue.gate)
    assert_close(y_TO, expected, case.in_width, epsilons=ROOM * 8 if case.gate else 8)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("name", "case", "dtype"), by_pairs([i.name for i in NORM_LINEAR.implementations], NORM_CASES, DTYPES), ids=str
)
def test_implementations_equal_the_reference(name: str, case: NormLinearCase, dtype: torch.dtype, device: str) -> None:
    arguments = case.inputs(dtype, torch.device(device))
    y_TO, s_TI = NORM_LINEAR.choose(Platform.of(torch.device(device)), name)(*arguments)
    expected, expected_s = NORM_LINEAR.reference(*arguments)
    assert_close(s_TI, expected_s, 1)
    assert_close(y_TO, expected, case.in_width, epsilons=ROOM * 8 if case.gate else 8)


@pytest.mark.parametrize("shared", [65_536, 101_376, 232_448])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_every_cut_chosen_can_be_launched(norm: bool, gated: bool, shared: int) -> None:
    for tokens in (1, 2, 3, 4, 5, 16, 17, 32, 33, 256):
        for inputs in (64, 200, 768, 1024, 2048, 3072, 4096, 8192, 14_336, 53_248):
            for outputs in (16, 100, 1024, 2048, 4096, 28_672, 151_936):
                cut = choose(tokens, inputs, outputs, shared=shared, norm=norm, gated=gated)
                if cut is None:
                    continue
                sizes = (cut.rows, cut.tokens, cut.block, cut.warps)
                assert all(size & (size - 1) == 0 for size in sizes)
                assert cut.tokens >= tokens
                if isinstance(cut, RowsPlan):
                    assert cut.block >= 256 * cut.warps  # every thread loads 16 bytes
                    assert cut.block >= inputs or not cut.programs
                else:
                    assert cut.stages >= 1
                    assert cut.ahead & (cut.ahead - 1) == 0
                    assert (cut.rows + cut.tokens) * cut.block * 2 * cut.stages <= shared


@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize(("tokens", "kind"), [(16, Tiles), (40, type(None))], ids=["tiles", "the library"])
def test_products_of_more_tokens_run_in_tiles_or_by_the_library(tokens: int, kind: type, gate: str | None) -> None:
    case = NormLinearCase(tokens, 128, 48, bias=True, gate=gate)
    assert isinstance(choose(tokens, case.in_width, case.out_width, norm=True, gated=gate is not None), kind)
    x, weight_OI, epilogue = case.inputs(torch.float16, CPU)
    y_TO, s_TI = implementation.norm_linear(x, weight_OI, epilogue)
    expected, expected_s = NORM_LINEAR.reference(x, weight_OI, epilogue)
    assert_close(s_TI, expected_s, 1)
    assert_close(y_TO, expected, case.in_width, epsilons=ROOM * 8 if gate else 8)
    alone_TO = implementation.linear(x.x_TI, weight_OI, None)
    assert_close(alone_TO, LINEAR.reference(x.x_TI, weight_OI, None), case.in_width)


def test_a_gradient_is_left_to_torch() -> None:
    x, weight_OI, epilogue = NORM_CASES[5].inputs(torch.float16, CPU)
    given = [a.requires_grad_() for a in (*x, weight_OI, *epilogue) if isinstance(a, Tensor)]
    y_TO, s_TI = implementation.norm_linear(x, weight_OI, epilogue)
    (y_TO.sum() + s_TI.sum()).backward()
    assert len(given) == 4
    assert all(a.grad is not None for a in given)
    x_TI, weight_OI, bias_O = (a.requires_grad_() for a in LinearCase(2, 64, 64, bias=True).inputs(torch.float16, CPU))
    implementation.linear(x_TI, weight_OI, bias_O).sum().backward()
    assert weight_OI.grad is not None


def test_a_fused_product_moves_less_than_its_parts() -> None:
    """The weight, x, the residual, their sum, the norm's weight and y, each once."""
    fused = norm_linear_cost(3, 64, 32, itemsize=2, gate="silu")
    assert fused.bytes == 2 * (2 * 32 * 64 + 3 * 64 * 3 + 64 + 3 * 32)
    plain = norm_linear_cost(3, 64, 32, itemsize=2, residual=False, bias=True)
    assert plain.bytes == 2 * (32 * 64 + 3 * 64 + 64 + 32 + 3 * 32)
    assert plain.flops == 3 * 32 * (2 * 64 + 1) + 4 * 3 * 64
