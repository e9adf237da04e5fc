"""Linear attention, delta attention and RWKV's weighted mean against their recurrences in float64.

Tolerances: an output is rounded once to its dtype, and may be off by a few of its epsilons. What float32 arithmetic in
another order loses grows with the length of its sums; states and values are of order one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.base.op import Op, Platform
from ridgeline.kernels.scans.gated_delta import op as delta
from ridgeline.kernels.scans.gated_delta.cases import CHANNEL_CASES, DeltaCase, channel_case
from ridgeline.kernels.scans.linear_attention import cases as linear_cases
from ridgeline.kernels.scans.linear_attention import op as linear
from ridgeline.kernels.scans.linear_attention.cases import LinearAttentionCase
from ridgeline.kernels.scans.linear_attention.torch_ops import met
from ridgeline.kernels.scans.metadata import metadata_of
from ridgeline.kernels.scans.wkv import cases as wkv_cases
from ridgeline.kernels.scans.wkv import op as wkv
from ridgeline.kernels.scans.wkv.cases import WkvCase
from tests.covering import by_pairs
from tests.kernels.scans.recurrent import Ran, assert_other_blocks_are_left_alone, in_steps, ran, spoiled

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16]
CPU = torch.device("cpu")


def names(op: Op[Any]) -> list[str]:
    return [implementation.name for implementation in op.implementations]


def chosen(op: Op[Any], name: str, device: str = "cpu") -> Callable[..., Any]:
    if name in ("triton", "batch_invariant", "triton_training"):
        pytest.importorskip("triton")
    return op.choose(Platform.of(torch.device(device)), name)


def assert_close(ours: Ran, theirs: Ran, slack: float) -> None:
    for got, want in zip(ours, theirs, strict=True):
        assert got.dtype == want.dtype
        tolerance = 2 * torch.finfo(got.dtype).eps
        torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance + slack, equal_nan=True)


def slack(name: str, dtype: torch.dtype) -> float:
    """What float32 sums of some dozen products lose, and products whose operands are rounded to 16 bits. Those of
    linear attention are of order ten, as nothing normalizes its queries and keys."""
    return 2.0**-15 if dtype == torch.float32 or not name.startswith("triton") else 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "case", "dtype"), by_pairs(names(linear.LINEAR_ATTENTION), linear_cases.CASES, DTYPES), ids=str
)
def test_linear_attention(name: str, case: LinearAttentionCase, dtype: torch.dtype, device: str) -> None:
    inputs = case.inputs(dtype, torch.device(device))
    ours = ran(chosen(linear.LINEAR_ATTENTION, name, device), inputs)
    assert_close(ours, ran(linear.linear_attention, inputs), slack(name, dtype))
    assert_other_blocks_are_left_alone(inputs[1], ours, inputs[2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "case", "dtype"), by_pairs(names(delta.DELTA_ATTENTION), CHANNEL_CASES, DTYPES), ids=str
)
def test_delta_attention(name: str, case: DeltaCase, dtype: torch.dtype, device: str) -> None:
    inputs = case.inputs(dtype, torch.device(device))
    ours = ran(chosen(delta.DELTA_ATTENTION, name, device), inputs)
    assert_close(ours, ran(delta.delta_rule, inputs), slack(name, dtype))
    assert_other_blocks_are_left_alone(inputs[1], ours, inputs[2])


def told(keys_TK: Tensor, values_TV: Tensor, asked_K: Tensor, rule: str) -> Tensor:
    """The answer to a last query, after tokens whose keys have length one and of which nothing is forgotten."""
    k_THK, v_THV = (torch.cat((x, torch.zeros_like(x[:1])))[:, None] for x in (keys_TK, values_TV))
    q_THK = asked_K.expand_as(k_THK)
    tokens, width = len(k_THK), keys_TK.shape[1]
    states, metadata = torch.zeros(5, 1, width, values_TV.shape[1]), metadata_of([tokens], CPU, fresh=(0,))
    if rule == "adds":
        added = linear.LinearInputs(q_THK, k_THK, v_THV, torch.zeros(1), 1.0)
        return linear.linear_attention(added, states, metadata)[-1, 0]
    never, always = torch.full_like(k_THK, -60.0), torch.full((tokens, 1), 60.0)
    none = torch.zeros(1), torch.zeros(1, width)
    replaced = delta.DeltaInputs(q_THK, k_THK, v_THV, never, always, *none, 1.0)
    return delta.delta_rule(replaced, states, metadata)[-1, 0]


@pytest.mark.parametrize("rule", ["adds", "replaces"])
def test_a_state_tells_as_many_keys_apart_as_it_has_rows(rule: str) -> None:
    keys, values = torch.linalg.qr(torch.randn(8, 8))[0], torch.randn(9, 5)
    for key, value in zip(keys, values, strict=False):
        torch.testing.assert_close(told(keys, values[:8], key, rule), value, rtol=0, atol=1e-5)
    one_more = torch.cat((keys, torch.nn.functional.normalize(torch.randn(1, 8))))
    wrong = [told(one_more, values, key, rule) - value for key, value in zip(keys, values, strict=False)]
    assert max(float(x.abs().max()) for x in wrong) > 0.1


def test_the_delta_rule_replaces_the_value_of_a_key_that_comes_again() -> None:
    keys, values = torch.linalg.qr(torch.randn(8, 8))[0][[0, 1, 0]], torch.randn(3, 5)
    torch.testing.assert_close(told(keys, values, keys[0], "replaces"), values[2], rtol=0, atol=1e-5)
    torch.testing.assert_close(told(keys, values, keys[0], "adds"), values[0] + values[2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "case", "dtype"), by_pairs(names(wkv.WKV), wkv_cases.CASES, DTYPES), ids=str)
def test_weighted_means(name: str, case: WkvCase, dtype: torch.dtype, device: str) -> None:
    inputs = case.inputs(dtype, torch.device(device))
    ours = ran(chosen(wkv.WKV, name, device), inputs)
    theirs = ran(wkv.wkv, inputs)
    exponents = max(1.0, case.large / 10) * 2.0**-16  # the error of an exponent is a factor of its exponential
    torch.testing.assert_close(
        ours.out.double(), theirs.out.double(), rtol=0, atol=exponents + 4 * torch.finfo(dtype).eps
    )
    for got, want in zip(meant(ours.states), meant(theirs.states), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=exponents, equal_nan=True)
    assert_other_blocks_are_left_alone(inputs[1], ours, inputs[2])


def meant(states_N3X: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the logarithm of the weight that states stand for. An exponent of an exponential is exact to a few
    of its own roundings, so the logarithm is compared with what it is of order of."""
    a, b, p = states_N3X.double().unbind(1)
    return a / b, (p + b.log()) / (1 + p.abs())


def test_decays_that_leave_nothing_do_not_overflow() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 64, 8, generator=generator) for _ in range(2))
    decay = -60 * torch.rand(2, 64, 8, generator=generator)
    total = decay.double().cumsum(-2)
    products = torch.einsum(
        "hik,hjk,hijk->hij", *(x.double() for x in (q, k, (total[:, :, None] - total[:, None]).exp()))
    )
    torch.testing.assert_close(met(q, k, decay).tril().double(), products.tril(), rtol=0, atol=2.0**-10)


@pytest.mark.parametrize(("op", "case"), [
    (linear.LINEAR_ATTENTION, LinearAttentionCase((40, 21), fresh=(0, 1), key_width=8, value_width=8)),
    (linear.LINEAR_ATTENTION, LinearAttentionCase((40, 21), 2, 8, 8, "token", fresh=(0, 1))),
    (delta.DELTA_ATTENTION, channel_case((40, 21), fresh=(0, 1), key_width=8, value_width=8)),
    (wkv.WKV, WkvCase((40, 21), fresh=(0, 1), channels=8)),
], ids=["channel", "token", "delta", "wkv"])  # fmt: skip
def test_gradients_are_those_of_the_recurrence(op: Op[Any], case: Any) -> None:
    """Of all inputs but the states, through float64 in the recurrence and float32 in the chunks."""
    given, states, metadata = case.inputs(torch.float32, CPU)
    found = []
    for name in ("reference", "torch"):
        mine = {name: x.detach().clone() for name, x in vars(given).items() if isinstance(x, Tensor)}
        for x in mine.values():
            x.requires_grad_(True)
        y = op.choose(Platform.of(CPU), name)(replace(given, **mine), states.clone(), metadata)
        weights = torch.linspace(-1, 1, y.numel()).view(y.shape)
        found.append(torch.autograd.grad((y * weights).sum(), list(mine.values())))
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


IN_ORDER = [
    (linear.LINEAR_ATTENTION, LinearAttentionCase((41, 1), fresh=(0,), key_width=16, value_width=16)),
    (delta.DELTA_ATTENTION, channel_case((41, 1), fresh=(0,), key_width=16, value_width=16)),
    (wkv.WKV, WkvCase((41, 1), fresh=(0,), channels=24)),
]


@pytest.mark.parametrize("size", [1, 7, 40])
@pytest.mark.parametrize(("op", "case"), IN_ORDER, ids=["linear", "delta", "wkv"])
def test_no_bit_depends_on_how_a_row_is_cut_into_steps(op: Op[Any], case: Any, size: int) -> None:
    run, inputs = chosen(op, "batch_invariant"), case.inputs(torch.float16, CPU)
    whole = ran(run, inputs)
    out, state = in_steps(run, inputs, size)
    assert torch.equal(out, whole.out[:41])
    assert torch.equal(state, whole.states[int(inputs[2].writes_R[0]) - 1])


@pytest.mark.parametrize("name", ["torch", "triton", "batch_invariant"])
@pytest.mark.parametrize(("op", "make"), [
    (linear.LINEAR_ATTENTION, lambda rows: LinearAttentionCase(rows, key_width=16, value_width=16)),
    (delta.DELTA_ATTENTION, lambda rows: channel_case(rows, key_width=16, value_width=16)),
    (wkv.WKV, lambda rows: WkvCase(rows, channels=24)),
], ids=["linear", "delta", "wkv"])  # fmt: skip
def test_a_row_does_not_depend_on_the_rows_beside_it(op: Op[Any], make: Any, name: str) -> None:
    """NaN in one request stays there."""
    given, states, metadata = make((20, 1, 70)).inputs(torch.float32, CPU)
    run = chosen(op, name)
    clean, other = ran(run, (given, states, metadata)), ran(run, (spoiled(given, slice(20)), states, metadata))
    assert other.out[:20].isnan().all()
    assert torch.equal(other.out[20:], clean.out[20:])
    for row in (1, 2):
        block = int(metadata.writes_R[row]) - 1
        assert torch.equal(other.states[block], clean.states[block])
