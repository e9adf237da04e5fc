"""The chunked form of linear attention that training runs on a GPU: its outputs, states and gradients are those of
torch's autograd through the recurrence in float64.

Tolerances are relative to the largest number of each gradient: sums over hundreds of tokens cancel, and what float32
loses is of the order of their terms. Numbers of 16 bits are rounded before each product, so a few of their epsilons
stay. An exponent between two tokens of one part is a difference of two sums of up to 16 decays, each of which is
rounded at every addition.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from ridgeline.kernels.scans.linear_attention.cases import LinearAttentionCase
from ridgeline.kernels.scans.linear_attention.op import LinearInputs, by_channel
from ridgeline.kernels.scans.metadata import ScanMetadata

pytest.importorskip("triton")
from ridgeline.kernels.scans.linear_attention import triton_training
from ridgeline.kernels.scans.linear_attention.triton_chunked import PART

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = ("o", "final", "dq", "dk", "dv", "d_decay", "d_initial")


def inputs_of(case: LinearAttentionCase, dtype: torch.dtype, device: str) -> tuple[list[Tensor], ScanMetadata, float]:
    """Queries, keys, values, decays and initial states, and rows that read and write their own states."""
    given, states, metadata = case.inputs(dtype, torch.device(device))
    initial_RHKV = states.nan_to_num(1.0)[: len(case.rows)].clone()
    own = torch.arange(len(case.rows), device=device)
    none = torch.zeros_like(metadata.fresh_R)
    own_metadata = replace(metadata, reads_R=own, writes_R=own, fresh_R=none)
    return [given.q_THK, given.k_THK, given.v_THV, given.decay, initial_RHKV], own_metadata, given.scale


def recurrence(given: list[Tensor], metadata: ScanMetadata, scale: float) -> tuple[Tensor, Tensor]:
    """The outputs and the final states, token by token, without an operation in place."""
    q_THK, k_THK, v_THV, decay, initial_RHKV = given
    left_THK = by_channel(decay, k_THK).exp()
    outputs, finals = [], list(initial_RHKV)
    for place, row in zip(metadata.start_R1.diff().nonzero().flatten().tolist(), metadata.rows(), strict=True):
        for t in range(row.start, row.end):
            finals[place] = left_THK[t, :, :, None] * finals[place] + k_THK[t, :, :, None] * v_THV[t, :, None]
            outputs.append(torch.einsum("hkv,hk->hv", finals[place], q_THK[t]) * scale)
    return torch.stack(outputs), torch.stack(finals)


def chunked(given: list[Tensor], metadata: ScanMetadata, scale: float) -> tuple[Tensor, Tensor]:
    *of_tokens, initial_RHKV = given
    return triton_training.linear_attention_from(LinearInputs(*of_tokens, scale), initial_RHKV, metadata)


def found(run: Any, given: list[Tensor], metadata: ScanMetadata, scale: float) -> dict[str, Tensor]:
    """The results and the gradients of a weighted sum of all outputs and final states."""
    mine = [x.detach().clone().requires_grad_(True) for x in given]
    o_THV, final_RHKV = run(mine, metadata, scale)
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64, device=o_THV.device)
    for x in (o_THV[: int(metadata.start_R1[-1])], final_RHKV):
        weights = torch.randn(x.shape, generator=generator).to(x.dtype).to(x.device)
        total = total + (x * weights).double().sum()
    results = o_THV.detach(), final_RHKV.detach(), *torch.autograd.grad(total, mine)
    return dict(zip(NAMES, results, strict=True))


def largest_error(ours: Tensor, theirs: Tensor) -> float:
    """The largest error over the largest number, which counts as 2⁻⁶⁰ if it is less."""
    return float((ours.double() - theirs).abs().max() / theirs.abs().max().clamp(min=2.0**-60))


def check(case: LinearAttentionCase, dtype: torch.dtype, tolerance: float, device: str = "cpu") -> None:
    given, metadata, scale = inputs_of(case, dtype, device)
    given = [x[: int(metadata.start_R1[-1])] if x.dim() and len(x) == metadata.num_tokens else x for x in given]
    metadata = replace(metadata, num_tokens=int(metadata.start_R1[-1]))
    theirs = found(recurrence, [x.double() for x in given], metadata, scale)
    ours = found(chunked, given, metadata, scale)
    errors = {name: largest_error(ours[name], theirs[name]) for name in NAMES}
    sums = functional.pad(by_channel(given[3], given[1]).double().cumsum(0), (0, 0, 0, 0, PART, 0))
    tolerance += PART * 2.0**-24 * float((sums[PART:] - sums[:-PART]).abs().max())
    assert max(errors.values()) < tolerance, (case, errors)
    for name, x in zip(NAMES[2:], given, strict=True):
        assert ours[name].dtype == x.dtype


CASES = (
    LinearAttentionCase((130, 1, 64, 0, 17), key_width=32, value_width=32),
    LinearAttentionCase((70, 65), heads=3, key_width=40, value_width=72, decay="token"),
    LinearAttentionCase((100, 3), heads=2, key_width=64, value_width=128, decay="head", fast=0.02),
    LinearAttentionCase((129,), heads=1, key_width=80, value_width=16, fast=30.0),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_the_recurrence(case: LinearAttentionCase, device: str) -> None:
    check(case, torch.float32, 2.0**-17, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_gradients_of_16_bits_are_as_exact_as_their_products(case: LinearAttentionCase, device: str) -> None:
    check(case, torch.float16, 2 * torch.finfo(torch.float16).eps, device)


ROWS = st.lists(st.sampled_from((0, 1, 2, 15, 16, 17, 47, 63, 64, 65, 128, 129)), min_size=1, max_size=3).filter(any)


@pytest.mark.dealt
@settings(max_examples=8, phases=(Phase.generate,))  # an example takes a second, so none is made smaller
@given(
    ROWS,
    st.integers(1, 2),
    st.sampled_from((8, 16, 33, 64, 72)),
    st.sampled_from((16, 24, 64, 80)),
    st.sampled_from(("channel", "token", "head")),
    st.sampled_from((1e-4, 0.1, 3.0, 100.0)),
)
def test_gradients_hold_for_any_rows_widths_and_decays(
    rows: list[int], heads: int, keys: int, values: int, decay: Any, fast: float
) -> None:
    """Decays of 1e-4 leave nearly all of a state, those of 100 nothing of it. Tokens that are 64 · 100 apart in the
    exponent would overflow if they met through a factor above one."""
    check(LinearAttentionCase(tuple(rows), heads, keys, values, decay, fast=fast), torch.float32, 2.0**-16)


def test_tokens_behind_the_rows_get_no_gradient() -> None:
    """A loss that reads the outputs of padding must not poison weights by what lies in memory."""
    given, states, metadata = LinearAttentionCase((20, 3), fresh=(0, 1), padding=5).inputs(torch.float32, CPU)
    mine = [x_T.detach().nan_to_num(0.0).requires_grad_(True) for x_T in given.by_token.values()]
    o_THV = triton_training.linear_attention(given.replaced(mine), states, metadata)
    assert torch.equal(o_THV[23:], torch.zeros_like(o_THV[23:]))
    for gradient in torch.autograd.grad(o_THV.sum(), mine):
        assert torch.equal(gradient[23:], torch.zeros_like(gradient[23:]))


def test_constant_decays_cost_no_gradient() -> None:
    """Retention: the decays are no parameters, and the kernel leaves their gradients out."""
    given, states, metadata = LinearAttentionCase((70,), fresh=(0,), decay="head").inputs(torch.float32, CPU)
    mine = [x_T.detach().requires_grad_(True) for x_T in given.by_token.values()]
    triton_training.linear_attention(given.replaced(mine), states, metadata).sum().backward()
    assert given.decay.grad is None
    assert all(x.grad is not None for x in mine)


@pytest.mark.dealt
def test_compiled_functions_break_around_the_kernels() -> None:
    given, states, metadata = LinearAttentionCase((20, 3), fresh=(0, 1)).inputs(torch.float32, CPU)

    def loss(*x: Tensor) -> Tensor:
        return (triton_training.linear_attention(LinearInputs(*x, given.scale), states, metadata) * 2).sin().sum()

    found = []
    for run in (loss, torch.compile(loss, backend="aot_eager")):
        mine = [x_T.detach().clone().requires_grad_(True) for x_T in given.by_token.values()]
        found.append(torch.autograd.grad(run(*mine), mine))
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain)
