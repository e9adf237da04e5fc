"""Mamba's selective scan and Mamba-2's recurrence: every implementation against the recurrence in float64.

Tolerances, relative to 1 + |result|: in float32 sums of some hundred numbers of about one, and decays whose logarithms
are differences of sums of up to about 100. Where states are forgotten at once, these sums go up to 64 tokens times 60,
which leaves the difference an error of 64 · 60 · 2**-23. In float16 what products take in is rounded to 11 bits, the
products of c and b before and behind their decays, and so is the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.base.op import Op, Platform
from ridgeline.kernels.scans.metadata import ScanMetadata, metadata_of
from ridgeline.kernels.scans.selective_scan import cases as mamba_cases
from ridgeline.kernels.scans.selective_scan import op as mamba
from ridgeline.kernels.scans.selective_scan.cases import SelectiveScanCase
from ridgeline.kernels.scans.ssd import cases as mamba2_cases
from ridgeline.kernels.scans.ssd import op as mamba2
from ridgeline.kernels.scans.ssd.cases import SsdCase
from tests.covering import by_pairs
from tests.kernels.scans.recurrent import Case, spoiled

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {torch.float32: 3e-5, torch.float16: 6e-3}
OPS: dict[str, tuple[Op[Any], Any]] = {
    "selective_scan": (mamba.SELECTIVE_SCAN, mamba_cases.CASES),
    "ssd": (mamba2.SSD, mamba2_cases.CASES),
}
DTYPES = [torch.float32, torch.float16]
IMPLEMENTED = [
    case
    for name, (op, cases) in OPS.items()
    for case in by_pairs([name], cases, [implementation.name for implementation in op.implementations], DTYPES)
]


def chosen(name: str, implementation: str) -> Callable[..., Tensor]:
    if implementation != "torch":
        pytest.importorskip("triton")
    return OPS[name][0].choose(Platform(device_type="cpu"), implementation)


def small(case: Any, implementation: str, device: str) -> Any:
    """Return a case that Triton's interpreter runs in a second: it takes scans element by element, and programs one
    after the other."""
    if device == "cuda" or implementation == "torch":
        return case
    if isinstance(case, SelectiveScanCase):
        return replace(case, channels=5, state_width=4)
    return replace(case, heads=case.groups) if implementation == "batch_invariant" else case


def copied(inputs: Case) -> Case:
    """Return the arguments with the states in a tensor of their own, strided by block id as a pool's are."""
    given, states, metadata = inputs
    pool = torch.full((len(states), 3, *states.shape[1:]), 7.0, device=states.device)
    pool[:, 1] = states
    return given, pool[:, 1], metadata


def assert_same(got: Tensor, want: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "case", "implementation", "dtype"), IMPLEMENTED, ids=str)
def test_outputs_and_states_are_those_of_the_recurrence(
    name: str, case: Any, implementation: str, dtype: torch.dtype, device: str
) -> None:
    """Fresh rows begin over NaN, inputs behind the last row are NaN, and blocks that no row writes keep their bits."""
    given, states, metadata = small(case, implementation, device).inputs(dtype, torch.device(device))
    live = int(metadata.start_R1[-1])
    inputs = spoiled(given, slice(live, None)), states, metadata
    ours, theirs = copied(inputs), copied(inputs)
    y, wanted = chosen(name, implementation)(*ours), OPS[name][0].reference(*theirs)
    assert y.dtype == dtype
    assert y.is_contiguous()
    exact = 3e-5 if case.fast == 1 else 64 * 60 * 2.0**-23
    assert_same(y[:live], wanted[:live], max(exact, TOLERANCE[dtype]))
    assert_same(ours[1][1:], theirs[1][1:], max(exact, TOLERANCE[dtype]) if implementation == "triton" else exact)
    assert (ours[1]._base[:, ::2] == 7).all()


@pytest.mark.parametrize("device", DEVICES)
def test_segments_and_chunks_change_nothing(device: str) -> None:
    """Rows of several segments, with marks at the ends of segments and chunks, within them, and at the row's end."""
    pytest.importorskip("triton")
    from ridgeline.kernels.scans.ssd.choose import Cut
    from ridgeline.kernels.scans.ssd.triton import ssd

    case = SsdCase((150, 1, 64, 63, 33, 128), 4, 2, marks=(64, 1, 64, 16, 20, 100), fresh=(0, 4), padding=3)
    run: Callable[..., Tensor] = ssd
    for cut in (Cut(16, segment=32), Cut(32, segment=64)):
        given = case.inputs(torch.float32, torch.device(device))
        ours, theirs = copied(given), copied(given)
        y, wanted = run(*ours, cut=cut), mamba2.ssd(*theirs)
        assert_same(y[:-3], wanted[:-3], 3e-5)
        assert_same(ours[1][1:], theirs[1][1:], 3e-5)


@pytest.mark.few(6)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("whole", "lanes", "dtype"), by_pairs([True, False], [0, 1, 2, 4], [*DTYPES, torch.bfloat16]), ids=str
)
def test_no_cut_of_the_selective_scan_changes_anything(
    whole: bool, lanes: int, dtype: torch.dtype, device: str
) -> None:
    """Rows that end within blocks of tokens and with them, whole warps of channels and others, and states that are not
    as many words as threads. (The interpreter rounds to bfloat16 by cutting off.)"""
    pytest.importorskip("triton")
    from ridgeline.kernels.scans.selective_scan.triton import selective_scan
    from ridgeline.kernels.scans.selective_scan.triton_tiles import Tiles
    from ridgeline.kernels.scans.selective_scan.triton_walk import LONG

    cut = Tiles(lanes, 2 * lanes) if lanes else LONG
    run: Callable[..., Tensor] = selective_scan
    channels, width = (32 // max(1, lanes), 16) if whole else (3, 12)
    case = SelectiveScanCase((26, 1, 9, 0, 2), channels, width, marks=(17, 1, 8, 0, 2), fresh=(0, 2), padding=2)
    given, states, metadata = case.inputs(dtype, torch.device(device))
    if not whole and given.z_TX is not None:  # steps and gates far from 0, too
        given = replace(given, dt_TX=10 * given.dt_TX, z_TX=10 * given.z_TX)
    inputs = spoiled(given, slice(-2, None)), states, metadata
    ours, theirs = copied(inputs), copied(inputs)
    y, wanted = run(*ours, cut=cut), mamba.selective_scan(*theirs)
    assert_same(y[:-2], wanted[:-2], 2.0**-7 if dtype == torch.bfloat16 else TOLERANCE[dtype])
    assert_same(ours[1][1:], theirs[1][1:], 3e-5)


def test_numbers_of_unaligned_rows_are_copied() -> None:
    pytest.importorskip("triton")
    from ridgeline.kernels.scans.selective_scan.triton import selective_scan

    case = SelectiveScanCase((11,), 3, 8)
    given, states, metadata = case.inputs(torch.float16, torch.device("cpu"))
    moved = torch.cat((given.b_TS[:, :1], given.b_TS, given.c_TS), 1)[:, 1:]
    shifted = replace(given, b_TS=moved[:, :8], c_TS=moved[:, 8:])
    assert_same(selective_scan(shifted, states.clone(), metadata), selective_scan(given, states, metadata), 0)


def steps_of(metadata: ScanMetadata, sizes: list[int]) -> list[tuple[slice, ScanMetadata]]:
    """Return the steps in which one row runs so many tokens each, all of which read and write its block."""
    steps, begin = [], 0
    for size in sizes:
        step = metadata_of((size,), metadata.reads_R.device, fresh=(0,) if begin == 0 else ())
        steps.append((slice(begin, begin + size), step))
        begin += size
    return steps


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPS)
def test_no_bit_of_a_batch_invariant_row_depends_on_its_steps_or_its_company(name: str, device: str) -> None:
    run = chosen(name, "batch_invariant")
    make = SelectiveScanCase if name == "selective_scan" else SsdCase
    case = small(make((3, 37, 1), fresh=(1,), marks=(0, 20, 0)), "batch_invariant", device)
    given = case.inputs(torch.float16, torch.device(device))
    inputs, states, metadata = copied(given)
    together = run(inputs, states, metadata)[3:40]
    at_mark, at_end = states[metadata.marked_R[1]].clone(), states[metadata.writes_R[1]].clone()
    row = inputs.at(slice(3, 40))
    for sizes in ([37], [1] * 37, [20, 17], [19, 1, 16, 1]):
        states.fill_(torch.nan)
        for tokens, step in steps_of(metadata, sizes):
            assert torch.equal(run(row.at(tokens), states, step), together[tokens])
            if tokens.stop == 20:
                assert torch.equal(states[1], at_mark)
        assert torch.equal(states[1], at_end)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("name", OPS)
def test_a_row_does_not_depend_on_its_company(name: str, implementation: str, device: str) -> None:
    """Not by a bit: its neighbours hold nothing but NaN."""
    run = chosen(name, implementation)
    make = SelectiveScanCase if name == "selective_scan" else SsdCase
    case = small(make((9, 70, 1), marks=(0, 9, 0)), implementation, device)
    inputs, states, metadata = copied(case.inputs(torch.float32, torch.device(device)))
    beside = spoiled(spoiled(inputs, slice(9)), slice(79, None))
    before = states[metadata.reads_R[1]].clone()
    y = run(beside, states, metadata)[9:79]
    at_mark, at_end = states[metadata.marked_R[1]].clone(), states[metadata.writes_R[1]].clone()
    states[1] = before
    step = metadata_of((70,), torch.device(device), marks=(9,))
    assert_same(run(inputs.at(slice(9, 79)), states, step), y, 1e-6)
    assert y.isfinite().all()
    assert_same(states[1], at_end, 1e-6)
    assert_same(states[3], at_mark, 1e-6)


def test_the_recurrence_is_a_product_with_a_lower_triangle() -> None:
    """y[i] = Σ_{j ≤ i} (c_i · b_j) exp(Σ_{j < k ≤ i} Δ_k rate) Δ_j x_j + skip · x_i, written out."""
    given, states, metadata = SsdCase((12,), fresh=(0,)).inputs(torch.float64, torch.device("cpu"))
    x, b, c = given.x_THP, given.b_TGS, given.c_TGS
    step_TH = torch.log1p(torch.exp(given.dt_TH + given.dt_bias_H))
    wanted = given.skip_H.double()[:, None] * x
    for i in range(12):
        for j in range(i + 1):
            left_H = torch.exp(step_TH[j + 1 : i + 1].sum(0) * given.rate_H) * step_TH[j]
            wanted[i] += (c[i, 0] @ b[j, 0]) * left_H[:, None] * x[j]
    got = mamba2.ssd(given, states, metadata)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_mamba_with_one_rate_for_all_numbers_of_a_channel_is_mamba2_with_heads_of_one_channel() -> None:
    case = SelectiveScanCase((17, 2), channels=6, gated=False)
    given, states, metadata = case.inputs(torch.float64, torch.device("cpu"))
    rate_XS = given.rate_XS[:, :1].expand_as(given.rate_XS)
    assert given.dt_bias_X is not None
    ours, theirs = states.clone(), states.clone()
    got = mamba.selective_scan(replace(given, rate_XS=rate_XS), ours, metadata)
    of_heads = mamba2.SsdInputs(
        given.x_TX[:, :, None], given.dt_TX, rate_XS[:, 0], given.b_TS[:, None], given.c_TS[:, None], given.skip_X,
        given.dt_bias_X, 0.0, float("inf"),
    )  # fmt: skip
    wanted = mamba2.ssd(of_heads, theirs[:, :, None], metadata)
    torch.testing.assert_close(got, wanted[..., 0])
    torch.testing.assert_close(ours, theirs)
