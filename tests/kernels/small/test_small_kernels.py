"""The small Triton kernels (norms, activations, rotary with cache writes) against the plain references.

Tolerances as in test_plain_ops.py: a few epsilons of the output's dtype. In the interpreter a cast to bfloat16
truncates, so one rounding is worth one epsilon instead of a half.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.base.case import as_cases
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.small.activation import op as activation
from ridgeline.kernels.small.activation.cases import ActivationCase
from ridgeline.kernels.small.norm import cases as norm_cases
from ridgeline.kernels.small.norm import op as norm
from ridgeline.kernels.small.norm.cases import LayerNormCase, NormCase
from ridgeline.kernels.small.output_gate import cases as output_gate_cases
from ridgeline.kernels.small.output_gate import op as output_gate
from ridgeline.kernels.small.output_gate.cases import OutputGateCase
from ridgeline.kernels.small.rotary import cases as rotary_cases
from ridgeline.kernels.small.rotary import op as rotary
from ridgeline.kernels.small.rotary.cases import RopeKVCase
from ridgeline.kernels.small.rotary.op import Projected
from ridgeline.kernels.small.token_gate import cases as token_gate_cases
from ridgeline.kernels.small.token_gate import op as token_gate
from ridgeline.kernels.small.token_gate.cases import TokenGateCase
from tests.covering import by_pairs

pytest.importorskip("triton")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_close(ours: Tensor, theirs: Tensor, epsilons: float, slack: float = 0) -> None:
    """Within `epsilons` of the dtype, relative above one; slack: what float32 arithmetic may lose, in 2**-24."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    tolerance = epsilons * torch.finfo(ours.dtype).eps
    torch.testing.assert_close(
        ours.double(), theirs.double(), rtol=tolerance, atol=tolerance + slack * 2.0**-24, equal_nan=True
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "case", "dtype"),
    by_pairs([each.name for each in rotary.ROPE_KV.implementations], rotary_cases.FUSED_CASES, DTYPES),
    ids=str,
)
def test_rope_kv(name: str, case: RopeKVCase, dtype: torch.dtype, device: str) -> None:
    """Caches start as NaN, so what a kernel writes beside its places shows; the null block holds no promise."""
    if device == "cpu":
        case = replace(case, tokens=min(case.tokens, 33))  # the interpreter is slow
    [inputs] = case.inputs(dtype, torch.device(device))
    ours, theirs = list(inputs), list(inputs)
    for copies in (ours, theirs):
        both = torch.stack((inputs[6], inputs[7]), 1)  # keeps the strides of two views of one allocation
        copies[6], copies[7] = both[:, 0], both[:, 1]
    q_THD = rotary.ROPE_KV.choose(Platform.of(torch.device(device)), name)(Projected(*ours))
    assert q_THD.is_contiguous()
    # sums of products of normal numbers: rounding an operand by half an epsilon moves the result by at most 5 halves
    assert_close(q_THD, rotary.ROPE_KV.reference(Projected(*theirs)), 8)
    for place in (6, 7):
        assert_close(ours[place][1:], theirs[place][1:], 8)
    assert torch.equal(ours[0], inputs[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["reference", *(i.name for i in rotary.ROPE_KV.implementations)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_written_keys_lie_at_their_places_and_nothing_else_changes(name: str, dtype: torch.dtype, device: str) -> None:
    """Without norms and rotation, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    qkv_TX = torch.randn(5, 8 * (3 + 2 * 2), generator=generator).to(device, dtype)
    _, k, v = qkv_TX.view(5, 7, 8).split((3, 2, 2), dim=1)
    units = torch.randn(6, 2, 2, 4, 8, generator=generator).to(device, dtype)
    caches = [units[:, 0], units[:, 1]]
    before = [cache.clone() for cache in caches]
    places = [9, 4, 23, 10, 20]
    rope_kv = rotary.ROPE_KV.choose(Platform.of(torch.device(device)), name)
    positions_T, place_T = torch.zeros(5, dtype=torch.int64, device=device), torch.tensor(places, device=device)
    rope_kv(Projected(qkv_TX, None, None, 0.0, None, positions_T, *caches, place_T, 3, 2))
    for written, cache, old in zip((k, v), caches, before, strict=True):
        for token, place in enumerate(places):
            assert torch.equal(cache[place // 4, :, place % 4], written[token])
            old[place // 4, :, place % 4] = written[token]
        assert torch.equal(cache, old)


NORM_CASES = (
    *norm_cases.CASES,
    NormCase(1, 8192, residual=True),
    NormCase(3, 1, eps=1e-5),
    NormCase(9, 3072, residual=True, eps=1e-5),
    NormCase(7, 80, heads=5, residual=True),
)
BIG_NORM_CASES = (NormCase(8192, 2048, residual=True), NormCase(256, 4096, residual=True), NormCase(700, 16384))


def poisoned(*shapes: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    """Leave NaN in the memory that the allocator is about to hand out."""
    for x in [torch.full(shape, torch.nan, device=device, dtype=dtype) for shape in shapes]:
        del x


def strided(x: Tensor) -> Tensor:
    """The same values as a view of wider rows."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 8), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., :-8] = x
    return wide[..., :-8]


@pytest.mark.parametrize(
    ("case", "device"),
    [
        *((case, "cpu") for case in NORM_CASES),
        *(pytest.param(case, "cuda", marks=pytest.mark.gpu) for case in (*NORM_CASES, *BIG_NORM_CASES)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("views", [False, True], ids=["dense", "strided"])
def test_norms(case: NormCase, dtype: torch.dtype, layer: bool, views: bool, device: str) -> None:
    op = norm.LAYER_NORM if layer else norm.RMS_NORM
    (case,) = as_cases(LayerNormCase, [case]) if layer else (case,)
    x, residual, *rest = case.inputs(dtype, torch.device(device))
    if views:
        x, residual = strided(x), None if residual is None else strided(residual)
    before = x.clone()
    poisoned(x.shape, x.shape, device=device, dtype=dtype)
    y, total = op.choose(Platform.of(torch.device(device)), "triton")(x, residual, *rest)
    want_y, want_total = op.reference(x, residual, *rest)
    if residual is None:
        assert total is x
    assert_close(total, want_total, 1)
    # a sum that rounded differently moves y by an epsilon (by twice that beside a mean close to it)
    assert_close(y, want_y, 4 if dtype == torch.float32 else 6, slack=16)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("rows", "width", "device"),
    [
        *((rows, width, "cpu") for rows, width in ((1, 64), (7, 352), (3, 2000), (33, 1024))),
        *(
            pytest.param(rows, width, "cuda", marks=pytest.mark.gpu)
            for rows, width in ((1, 64), (7, 352), (256, 14336), (8192, 16384), (1, 28672))
        ),
    ],
)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_activations(rows: int, width: int, kind: str, dtype: torch.dtype, gated: bool, device: str) -> None:
    check_activation(rows, width, kind, dtype, gated, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["swiglu_clamped", "silu_clamped_7", "silu_clamped_16"])
def test_gates_with_bounds(kind: str, dtype: torch.dtype, device: str) -> None:
    check_activation(7, 352, kind, dtype, True, device)


def check_activation(rows: int, width: int, kind: str, dtype: torch.dtype, gated: bool, device: str) -> None:
    op = activation.GATED_ACTIVATION if gated else activation.ACTIVATION
    x, _ = ActivationCase(rows, width, kind).inputs(dtype, torch.device(device))
    poisoned((rows, width // 2 if gated else width), device=device, dtype=dtype)
    run = op.choose(Platform.of(torch.device(device)), "triton")
    assert_close(run(x, kind), op.reference(x, kind), 4, slack=256 if gated else 16)
    assert_close(run(strided(x), kind), op.reference(x, kind), 4, slack=256 if gated else 16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", output_gate_cases.CASES, ids=str)
def test_output_gates(case: OutputGateCase, dtype: torch.dtype, device: str) -> None:
    op, inputs = output_gate.OUTPUT_GATE, case.inputs(dtype, torch.device(device))
    poisoned((case.tokens, case.width), device=device, dtype=dtype)
    run = op.choose(Platform.of(torch.device(device)), "triton")
    assert_close(run(*inputs), op.reference(*inputs), 4, slack=256)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", token_gate_cases.CASES, ids=str)
def test_token_gates(case: TokenGateCase, dtype: torch.dtype, device: str) -> None:
    op, inputs = token_gate.TOKEN_GATE, case.inputs(dtype, torch.device(device))
    poisoned((case.tokens, case.width), device=device, dtype=dtype)
    run = op.choose(Platform.of(torch.device(device)), "triton")
    assert_close(run(*inputs), op.reference(*inputs), 4, slack=256)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"])
def test_activations_hold_at_the_ends_of_the_range(kind: str) -> None:
    x = torch.tensor([[-1e4, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e4]])
    ours = activation.ACTIVATION.choose(Platform(device_type="cpu"), "triton")(x, kind)
    assert_close(ours, activation.ACTIVATION.reference(x, kind), 4)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="swoosh"):
        activation.ACTIVATION.choose(Platform(device_type="cpu"), "triton")(torch.ones(1, 2), "swoosh")


def test_programs_have_shapes_that_the_compiler_takes() -> None:
    """Powers of two, and at most 32 warps: the interpreter would not mind others."""
    from ridgeline.kernels.small.activation import triton as activations
    from ridgeline.kernels.small.norm import triton as norms
    from ridgeline.kernels.small.rotary import triton as rotaries
    from ridgeline.kernels.step import triton as steps

    numbers: list[int] = []
    for tokens, width in product((1, 7, 33, 300, 8192), (1, 16, 48, 80, 96, 128, 768, 3072, 28672)):
        numbers += norms.config(width) + activations.config(tokens, width) + steps.inputs_config(width, tokens)[:1]
        for heads, kv_heads in ((1, 1), (5, 3), (14, 2), (32, 32)):
            numbers += rotaries.config(tokens, heads, kv_heads, width)
        assert max(norms.config(width)[-1], activations.config(tokens, width)[-1]) <= 32
    assert all(number > 0 and number & (number - 1) == 0 for number in numbers)
