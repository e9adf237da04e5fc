"""The gated delta rule, and its convolution and norm, against their recurrences in float64.

Tolerances: an output is rounded once to its dtype, and may be off by a few of its epsilons. What float32 arithmetic in
another order loses grows with the length of its sums; states and values are of order one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from ridgeline.kernels.base.op import Op, Platform
from ridgeline.kernels.scans.causal_conv import cases as conv_cases
from ridgeline.kernels.scans.causal_conv import op as conv
from ridgeline.kernels.scans.causal_conv.cases import ConvCase
from ridgeline.kernels.scans.causal_conv.cost import causal_conv_cost
from ridgeline.kernels.scans.gated_delta import op as delta
from ridgeline.kernels.scans.gated_delta.cases import GATED_CASES, DeltaCase
from ridgeline.kernels.scans.gated_delta.cost import gated_delta_cost
from ridgeline.kernels.small.gated_norm import cases as norm_cases
from ridgeline.kernels.small.gated_norm import op as norm
from ridgeline.kernels.small.gated_norm.cases import GatedNormCase
from ridgeline.kernels.small.gated_norm.cost import gated_norm_cost
from tests.covering import by_pairs
from tests.kernels.scans.recurrent import Ran, assert_other_blocks_are_left_alone, in_steps, ran, spoiled

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16]


def names(op: Op[Any]) -> list[str]:
    return [implementation.name for implementation in op.implementations]


def chosen(op: Op[Any], name: str, device: str) -> Callable[..., Any]:
    if name not in ("torch", "reference"):
        pytest.importorskip("triton")
    return op.choose(Platform.of(torch.device(device)), name)


def rounded(name: str, dtype: torch.dtype) -> float:
    """What products lose whose operands are rounded to 16 bits: states, values and changes are of order one, and the
    errors of a sum's terms have no common sign."""
    return 2.0**-17 if dtype == torch.float32 or name != "triton" else 2 * torch.finfo(dtype).eps


def assert_close(ours: Ran, exact: Ran, slack: float, epsilons: float = 2) -> None:
    for got, want in zip(ours, exact, strict=True):
        assert got.dtype == want.dtype
        tolerance = epsilons * torch.finfo(got.dtype).eps
        torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance + slack, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "case", "dtype"), by_pairs(names(conv.CAUSAL_CONV), conv_cases.CASES, DTYPES), ids=str
)
def test_convolution(name: str, case: ConvCase, dtype: torch.dtype, device: str) -> None:
    inputs = case.inputs(dtype, torch.device(device))
    ours = ran(chosen(conv.CAUSAL_CONV, name, device), inputs)
    assert_close(ours, ran(conv.causal_conv, inputs), slack=2.0**-20)
    assert_other_blocks_are_left_alone(inputs[1], ours, inputs[2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "case", "dtype"), by_pairs(names(delta.GATED_DELTA), GATED_CASES, DTYPES), ids=str)
def test_gated_delta(name: str, case: DeltaCase, dtype: torch.dtype, device: str) -> None:
    inputs = case.inputs(dtype, torch.device(device))
    ours = ran(chosen(delta.GATED_DELTA, name, device), inputs)
    assert_close(ours, ran(delta.delta_rule, inputs), slack=rounded(name, dtype))
    assert_other_blocks_are_left_alone(inputs[1], ours, inputs[2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", norm_cases.CASES, ids=str)
@pytest.mark.parametrize("name", names(norm.GATED_NORM))
def test_gated_norm(name: str, case: GatedNormCase, dtype: torch.dtype, device: str) -> None:
    inputs = case.inputs(dtype, torch.device(device))
    got = chosen(norm.GATED_NORM, name, device)(*inputs)
    assert got.is_contiguous()
    tolerance = 4 * torch.finfo(dtype).eps  # in the interpreter a cast to bfloat16 truncates
    torch.testing.assert_close(got, norm.gated_norm(*inputs), rtol=tolerance, atol=tolerance)


def test_references_are_the_models_own_arithmetic() -> None:
    """That of transformers, for a fresh row."""
    case = replace(GATED_CASES[-1], rows=(70,), fresh=(0,), alike=0.3)
    inputs = case.inputs(torch.float32, torch.device("cpu"))
    (given, _, _), (got, left) = inputs, ran(delta.delta_rule, inputs)
    decay = -given.log_rate_G.exp() * torch.nn.functional.softplus(given.a + given.dt_bias)
    wide_q, wide_k = (x.repeat_interleave(2, dim=1)[None] for x in (given.q_THK, given.k_THK))
    out, state = theirs.torch_chunk_gated_delta_rule(
        wide_q, wide_k, given.v_TGV[None], decay[None], given.b_TG.sigmoid()[None], output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    torch.testing.assert_close(got, out[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(left[0], state[0], rtol=1e-5, atol=1e-5)

    module = theirs.Qwen3NextRMSNormGated(64)
    torch.nn.init.normal_(module.weight)
    x, z = torch.randn(2, 5, 3, 64)
    torch.testing.assert_close(norm.gated_norm(x, z, module.weight, 1e-6, 64, True), module(x, z))

    short, tails, metadata = ConvCase((9,), 8, bias=True, fresh=(0,)).inputs(torch.float32, x.device)
    x, weight = short.x_TX, short.weight_XW[:, None]
    padded = torch.nn.functional.conv1d(x.T[None], weight, short.bias_X, padding=3, groups=8)[0, :, :9].T
    got = conv.causal_conv(short, tails, metadata)
    torch.testing.assert_close(got, torch.nn.functional.silu(padded))
    torch.testing.assert_close(tails[1], x[-3:])


@pytest.mark.parametrize("size", [1, 3, 40])
@pytest.mark.parametrize(
    ("op", "name", "case"),
    [
        (conv.CAUSAL_CONV, "triton", ConvCase((41, 1), 24, bias=True, fresh=(0,))),
        (delta.GATED_DELTA, "batch_invariant", DeltaCase((41, 1), value_heads=2, value_width=16, fresh=(0,))),
    ],
    ids=["conv", "delta"],
)
def test_no_bit_depends_on_how_a_row_is_cut_into_steps(op: Op[Any], name: str, case: Any, size: int) -> None:
    run, inputs = chosen(op, name, "cpu"), case.inputs(torch.float16, torch.device("cpu"))
    whole = ran(run, inputs)
    out, state = in_steps(run, inputs, size)
    assert torch.equal(out, whole.out[:41])
    assert torch.equal(state, whole.states[int(inputs[2].writes_R[0]) - 1])


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_row_does_not_depend_on_the_rows_beside_it(name: str) -> None:
    """NaN in one request stays there."""
    given, states, metadata = DeltaCase((70, 1, 70), key_width=16, value_width=16).inputs(
        torch.float32, torch.device("cpu")
    )
    run = chosen(delta.GATED_DELTA, name, "cpu")
    clean, other = ran(run, (given, states, metadata)), ran(run, (spoiled(given, slice(70)), states, metadata))
    assert other.out[:70].isnan().all()
    assert torch.equal(other.out[70:], clean.out[70:])
    for row in (1, 2):
        block = int(metadata.writes_R[row]) - 1
        assert torch.equal(other.states[block], clean.states[block])


@pytest.mark.parametrize(
    "call",
    [lambda: conv.activation_of("gelu"), lambda: norm.gate_of("gelu")],
    ids=["activation", "gate"],
)
def test_unknown_names_are_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"gelu.*known"):
        call()


def test_costs_count_what_there_is() -> None:
    """One token: the state in and out, and six operations for each of its numbers. In chunks: more, for each pair."""
    shape = {"heads": 2, "value_heads": 4, "key_width": 8, "value_width": 16, "itemsize": 2}
    one, none, many = (gated_delta_cost(rows, **shape) for rows in ([1], [1, 0], [64, 64]))
    assert one == none
    assert one.flops == 6 * 4 * 8 * 16
    assert one.bytes == 8 * 4 * 8 * 16 + 2 * (2 * 2 * 8 + 2 * 4 * 16 + 2 * 4)
    assert many.flops == 128 * one.flops + 4 * (2 * 64 * 63 / 2) * (2 * 8 + 4 * 16)
    assert causal_conv_cost(3, 1, 10, 4, itemsize=2).bytes == 2 * 10 * (3 + 3 + 3 + 3 + 4)
    assert causal_conv_cost(3, 1, 10, 4, itemsize=2, bias=True).bytes == 2 * 10 * (3 + 3 + 3 + 3 + 4 + 1)
    assert gated_norm_cost(5, 8, itemsize=2).bytes == 2 * 8 * (15 + 1)
