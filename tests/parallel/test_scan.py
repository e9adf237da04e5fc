"""Recurrent ops whose rows are divided over ranks equal the recurrence of one device, in float64: outputs, and states
on every rank, with rows cut anywhere, marks, fresh rows, and ranks without tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.core.plan.pieces import Piece, bounds_of, pieces_of
from ridgeline.kernels.base.op import Op, Platform
from ridgeline.kernels.scans.causal_conv import op as conv
from ridgeline.kernels.scans.causal_conv.cases import ConvCase
from ridgeline.kernels.scans.causal_conv.transfer import transfer as shifted_by
from ridgeline.kernels.scans.gated_delta import op as gated
from ridgeline.kernels.scans.gated_delta.cases import DeltaCase, channel_case
from ridgeline.kernels.scans.gated_delta.transfer import transfer as moved_by
from ridgeline.kernels.scans.linear_attention import op as linear
from ridgeline.kernels.scans.linear_attention.cases import LinearAttentionCase
from ridgeline.kernels.scans.linear_attention.transfer import transfer as faded_by
from ridgeline.kernels.scans.metadata import RecurrentOp, ScanMetadata, Tells
from ridgeline.kernels.scans.selective_scan import op as selective
from ridgeline.kernels.scans.selective_scan.cases import SelectiveScanCase
from ridgeline.kernels.scans.selective_scan.transfer import transfer as selected_by
from ridgeline.kernels.scans.ssd import op as ssd
from ridgeline.kernels.scans.ssd.cases import SsdCase
from ridgeline.kernels.scans.ssd.transfer import transfer as stepped_by
from ridgeline.kernels.scans.wkv import op as wkv
from ridgeline.kernels.scans.wkv.cases import WkvCase
from ridgeline.kernels.scans.wkv.transfer import transfer as weighed_by
from ridgeline.parallel.ring import SOLO, Ring
from ridgeline.parallel.scan import TOLD_BYTES, PieceScan, piece_bytes
from tests.parallel.threads import ThreadAxis, on_ranks

CPU = torch.device("cpu")


class Bound(NamedTuple):
    """An op, what tells its transfers, its inputs and states, and the rows."""

    op: RecurrentOp
    tells: Tells
    states_N: Tensor
    given: Any
    metadata: ScanMetadata


class Subject(NamedTuple):
    """An op with its case. small: widths for the reference, which runs in float64."""

    op: Op[Any]
    tells: Tells
    case: Callable[..., Any]
    small: dict[str, Any]

    def __call__(self, rows: Sequence[int], run: RecurrentOp | None = None, **fields: Any) -> Bound:
        """Bind the reference to small inputs, or `run` to inputs in float32."""
        wide = torch.float32 if run else torch.float64
        case = self.case(tuple(rows), **fields, **({} if run else self.small))
        given, states_N, metadata = case.inputs(wide, CPU)
        own = {name: x.to(wide) for name, x in vars(given).items() if isinstance(x, Tensor)}
        return Bound(run or self.op.reference, self.tells, states_N.to(wide), replace(given, **own), metadata)


WIDTHS = {"key_width": 4, "value_width": 3}
OF_HEADS = {"heads": 4, "groups": 2, "head_width": 3, "state_width": 5}
convolution = partial(ConvCase, channels=32, bias=True)
by_token, by_head = (partial(LinearAttentionCase, decay=decay) for decay in ("token", "head"))
OPS = {
    "ssd": Subject(ssd.SSD, stepped_by, partial(SsdCase, dt_max=0.5), OF_HEADS),
    "selective_scan": Subject(
        selective.SELECTIVE_SCAN, selected_by, SelectiveScanCase, {"channels": 6, "state_width": 4}
    ),
    "linear_attention, channels": Subject(linear.LINEAR_ATTENTION, faded_by, LinearAttentionCase, WIDTHS),
    "linear_attention, tokens": Subject(linear.LINEAR_ATTENTION, faded_by, by_token, WIDTHS),
    "linear_attention, heads": Subject(linear.LINEAR_ATTENTION, faded_by, by_head, WIDTHS),
    "gated_delta": Subject(gated.GATED_DELTA, moved_by, partial(DeltaCase, alike=0.7), WIDTHS),
    "delta_attention": Subject(gated.DELTA_ATTENTION, moved_by, partial(channel_case, alike=0.7), WIDTHS),
    "wkv": Subject(wkv.WKV, weighed_by, partial(WkvCase, large=30.0), {"channels": 5}),
    "causal_conv": Subject(conv.CAUSAL_CONV, shifted_by, convolution, {"channels": 5}),
    "causal_conv of the last token": Subject(
        conv.CAUSAL_CONV, shifted_by, partial(convolution, width=2), {"channels": 5}
    ),
}


def divided(
    bound: Bound, ranks: int, pieces: list[Piece], short: int = 0, told: int = TOLD_BYTES
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs of all tokens, and the states that each rank has at last."""
    owner_T = torch.cat([torch.full((piece.tokens,), piece.rank) for piece in pieces] or [torch.zeros(0)])

    def work(ring: Ring) -> tuple[Tensor, Tensor]:
        own_T, states_N = (owner_T == ring.rank).nonzero()[:, 0], bound.states_N.clone()
        scan = PieceScan(ring, pieces, CPU, short, told)
        return scan.run(bound.metadata, bound.op, bound.tells, states_N, bound.given.at(own_T)), states_N

    found = on_ranks(ranks, work)
    outputs_T = found[0][0].new_zeros(len(owner_T), *found[0][0].shape[1:])
    for rank, (part_T, _) in enumerate(found):
        outputs_T[owner_T == rank] = part_T
    return outputs_T, [states_N for _, states_N in found]


def check(bound: Bound, ranks: int, pieces: list[Piece], short: int = 0, told: int = TOLD_BYTES) -> None:
    want_N = bound.states_N.clone()
    want_T = bound.op(bound.given, want_N, bound.metadata)
    got_T, states = divided(bound, ranks, pieces, short, told)
    torch.testing.assert_close(got_T, want_T[: len(got_T)], rtol=1e-10, atol=1e-10)
    for states_N in states:
        assert torch.equal(states_N[1:].nan_to_num(), states[0][1:].nan_to_num()), "ranks must go on with the same bits"
        torch.testing.assert_close(states_N[1:], want_N[1:], rtol=1e-10, atol=1e-10, equal_nan=True)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[int]]:
    """Rows, their marks, the fresh ones, and the first token of each rank."""
    rows = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
    marks = [draw(st.integers(0, tokens)) for tokens in rows]
    fresh = [row for row in range(len(rows)) if draw(st.booleans())]
    ranks, tokens = draw(st.integers(2, 8)), sum(rows)
    if draw(st.booleans()):
        return rows, marks, fresh, bounds_of(tokens, ranks)
    cuts = sorted(draw(st.lists(st.integers(0, tokens), min_size=ranks - 1, max_size=ranks - 1)))
    return rows, marks, fresh, [0, *cuts, tokens]


@pytest.mark.few(5)
@pytest.mark.parametrize("name", OPS)
@settings(max_examples=25, deadline=None)
@given(step=steps(), short=st.integers(0, 12), told=st.sampled_from([1, 1000, TOLD_BYTES]))
def test_ranks_scan_as_one_device(
    name: str, step: tuple[list[int], list[int], list[int], list[int]], short: int, told: int
) -> None:
    rows, marks, fresh, bounds = step
    bound = OPS[name](rows, marks=tuple(marks), fresh=tuple(fresh))
    check(bound, len(bounds) - 1, list(pieces_of(rows, marks, bounds)), short, told)


@pytest.mark.parametrize("name", OPS)
def test_what_ranks_tell_at_once_is_bounded(name: str) -> None:
    """By so many bytes and a piece of each rank, whatever rows there are; in as few exchanges as that takes."""
    rows, ranks = [9 + n % 5 for n in range(40)], 3
    marks = [n % 4 for n in range(40)]
    bound, pieces = OPS[name](rows, marks=tuple(marks)), list(pieces_of(rows, marks, bounds_of(sum(rows), ranks)))
    each = piece_bytes(bound.states_N.shape[1:], bound.states_N.itemsize)

    def work(axis: ThreadAxis) -> list[int]:
        ring = Noting(axis.rank, axis.size, axis._barrier, axis._held)
        own = bound.given.at(slice(*bounds_of(sum(rows), ranks)[axis.rank : axis.rank + 2]))
        PieceScan(ring, pieces, CPU, told=10 * each).run(
            bound.metadata, bound.op, bound.tells, bound.states_N.clone(), own
        )
        return ring.received

    for received in on_ranks(ranks, work):
        assert len(received) == -(-len(pieces) // 10)
        assert max(received) <= (10 + ranks + 1) * each


class Noting(ThreadAxis):
    """A ring that notes how many bytes come in an exchange."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.received: list[int] = []

    def exchanged(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        found = super().exchanged(parts, shapes)
        self.received.append(sum(part.nbytes for part in found))
        return found


@pytest.mark.parametrize("name", OPS)
def test_a_rank_may_have_several_pieces_of_a_row(name: str) -> None:
    """As in a zig-zag, where rank r has the r-th piece from either end."""
    deal = [Piece(rank, 0, tokens) for rank, tokens in zip((0, 1, 2, 2, 1, 0), (3, 2, 5, 1, 4, 3), strict=True)]
    for short in (0, 4, 18):
        check(OPS[name]([18, 4]), 3, [*deal, Piece(1, 1, 4)], short)


@pytest.mark.parametrize("name", OPS)
def test_what_pieces_do_to_states_is_all_that_ranks_tell(name: str) -> None:
    """A transfer that is wrong is seen: the outputs of the first rank alone stay right."""
    bound = OPS[name]([16])

    def wrong(*arguments: Any) -> Any:
        told: Any = bound.tells(*arguments)
        return type(told)(*(1.5 * x if x.is_floating_point() else x for x in vars(told).values()))

    pieces = list(pieces_of([16], [0], bounds_of(16, 2)))
    right_T, wrong_T = (divided(each, 2, pieces)[0] for each in (bound, bound._replace(tells=wrong)))
    assert torch.equal(right_T[:8], wrong_T[:8])
    assert not torch.allclose(right_T[8:], wrong_T[8:])


IMPLEMENTED = (
    "ssd", "selective_scan", "linear_attention, channels", "gated_delta", "delta_attention", "wkv", "causal_conv"
)  # fmt: skip


@pytest.mark.few(7)
@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("name", IMPLEMENTED)
def test_kernels_run_pieces_as_they_run_rows(name: str, kernel: str) -> None:
    """In float32: pieces of one token and of more than a chunk, on a single rank, beside a row that is short."""
    if kernel == "triton":
        pytest.importorskip("triton")
    run = OPS[name].op.choose(Platform.of(CPU), kernel)
    # Interpreted, a scan goes element by element; and its walk over tokens is the same for a few channels
    narrow = OPS[name].small if (name, kernel) == ("selective_scan", "triton") else {}
    bound = OPS[name]([75, 1], run=run, marks=(70, 0), fresh=(1,), **narrow)
    pieces = [Piece(0, 0, 1), Piece(0, 0, 69, marked=True), Piece(0, 0, 5), Piece(0, 1, 1)]
    want_N, got_N = bound.states_N.clone(), bound.states_N.clone()
    want_T = bound.op(bound.given, want_N, bound.metadata)
    got_T = PieceScan(SOLO, pieces, CPU).run(bound.metadata, bound.op, bound.tells, got_N, bound.given)
    torch.testing.assert_close(got_T, want_T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got_N[1:], want_N[1:], rtol=1e-4, atol=1e-4, equal_nan=True)
