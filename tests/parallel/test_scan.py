"""Recurrent ops whose rows are divided over ranks equal the recurrence of one device, in float64: outputs, and states
on every rank, with rows cut anywhere, marks, fresh rows, and ranks without tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.core.pieces import Piece, bounds_of, pieces_of
from ridgeline.kernels.causal_conv import op as conv
from ridgeline.kernels.causal_conv.cases import ConvCase
from ridgeline.kernels.causal_conv.transfer import transfer as shifted_by
from ridgeline.kernels.delta_attention import op as delta
from ridgeline.kernels.delta_attention.cases import DeltaAttentionCase
from ridgeline.kernels.gated_delta import op as gated
from ridgeline.kernels.gated_delta.cases import GatedDeltaCase
from ridgeline.kernels.gated_delta.transfer import transfer as moved_by
from ridgeline.kernels.linear_attention import op as linear
from ridgeline.kernels.linear_attention.cases import LinearAttentionCase
from ridgeline.kernels.linear_attention.transfer import transfer as faded_by
from ridgeline.kernels.op import Op, Platform
from ridgeline.kernels.selective_scan import op as selective
from ridgeline.kernels.selective_scan.cases import SelectiveScanCase
from ridgeline.kernels.selective_scan.transfer import transfer as selected_by
from ridgeline.kernels.ssd import op as ssd
from ridgeline.kernels.ssd.cases import SsdCase
from ridgeline.kernels.ssd.transfer import transfer as stepped_by
from ridgeline.kernels.turns import Pieces, RecurrentOp, Tells, Turns
from ridgeline.kernels.wkv import op as wkv
from ridgeline.kernels.wkv.cases import WkvCase
from ridgeline.kernels.wkv.transfer import transfer as weighed_by
from ridgeline.parallel.ring import SOLO, Ring
from ridgeline.parallel.scan import TOLD_BYTES, PieceScan, piece_bytes
from tests.parallel.threads import ThreadAxis, on_ranks

CPU = torch.device("cpu")


Run = Callable[..., Tensor]


class Bound(NamedTuple):
    """An op with what is its own, what tells its transfers, its states, and its inputs by token."""

    op: RecurrentOp
    tells: Tells
    states_N: Tensor
    inputs_T: Sequence[Tensor]
    turns: Turns


def sized(reference: Run, run: Run, case: dict[str, Any], **small: Any) -> tuple[torch.dtype, dict[str, Any]]:
    """Return the dtype and the case for an op: float64 and small for the reference, else as kernels take them."""
    return (torch.float64, {**case, **small}) if run is reference else (torch.float32, case)


def bound_ssd(rows: Sequence[int], run: Run = ssd.ssd, **case: Any) -> Bound:
    wide, case = sized(ssd.ssd, run, case, heads=4, groups=2, head_width=3, state_width=5)
    made = SsdCase(tuple(rows), dt_max=0.5, **case)
    x, dt, rate_H, b, c, skip_H, bias_H, low, high, states_N, turns = made.inputs(wide, CPU)

    def op(turns: Turns, states_N: Tensor, *inputs_T: Tensor) -> Tensor:
        x, dt, b, c = inputs_T
        return run(x, dt, rate_H, b, c, skip_H, bias_H, low, high, states_N, turns)

    def tells(pieces: Pieces, *inputs_T: Tensor) -> Any:
        x, dt, b, _ = inputs_T
        return stepped_by(pieces, x, dt, rate_H, b, bias_H, low, high)

    return Bound(op, tells, states_N.to(wide), (x, dt, b, c), turns)


def bound_selective(rows: Sequence[int], run: Run = selective.selective_scan, **case: Any) -> Bound:
    wide, case = sized(selective.selective_scan, run, case, channels=6, state_width=4)
    made = SelectiveScanCase(tuple(rows), **case)
    x, dt, rate_XS, b, c, skip_X, bias_X, z, states_N, turns = made.inputs(wide, CPU)
    assert z is not None

    def op(turns: Turns, states_N: Tensor, *inputs_T: Tensor) -> Tensor:
        x, dt, b, c, z = inputs_T
        return run(x, dt, rate_XS, b, c, skip_X, bias_X, z, states_N, turns)

    def tells(pieces: Pieces, *inputs_T: Tensor) -> Any:
        added_RXS = pieces.ran(op, states_N.to(wide), *inputs_T)
        return selected_by(pieces, inputs_T[1], rate_XS, bias_X, added_RXS)

    return Bound(op, tells, states_N.to(wide), (x, dt, b, c, z), turns)


def bound_linear(decay: Any, rows: Sequence[int], run: Run = linear.linear_attention, **case: Any) -> Bound:
    wide, case = sized(linear.linear_attention, run, case, key_width=4, value_width=3)
    made = LinearAttentionCase(tuple(rows), decay=decay, **case)
    q, k, v, g, states_N, turns, scale = made.inputs(wide, CPU)
    g = g.to(wide)
    by_token = () if decay == "head" else (g,)

    def op(turns: Turns, states_N: Tensor, *inputs_T: Tensor) -> Tensor:
        q, k, v, *own = inputs_T
        return run(q, k, v, own[0] if own else g, states_N, turns, scale)

    def tells(pieces: Pieces, *inputs_T: Tensor) -> Any:
        _, k, v, *own = inputs_T
        return faded_by(pieces, k, v, own[0] if own else g)

    return Bound(op, tells, states_N.to(wide), (q, k, v, *by_token), turns)


def bound_gated(rows: Sequence[int], run: Run = gated.gated_delta, **case: Any) -> Bound:
    wide, case = sized(gated.gated_delta, run, case, key_width=4, value_width=3)
    made = GatedDeltaCase(tuple(rows), alike=0.7, **case)
    q, k, v, a, b, rate_G, bias_G, states_N, turns, scale = made.inputs(wide, CPU)

    def op(turns: Turns, states_N: Tensor, *inputs_T: Tensor) -> Tensor:
        q, k, v, a, b = inputs_T
        return run(q, k, v, a, b, rate_G, bias_G, states_N, turns, scale)

    return Bound(op, partial(_moved, op, states_N.to(wide)), states_N.to(wide), (q, k, v, a, b), turns)


def bound_delta(rows: Sequence[int], run: Run = delta.delta_attention, **case: Any) -> Bound:
    wide, case = sized(delta.delta_attention, run, case, key_width=4, value_width=3)
    made = DeltaAttentionCase(tuple(rows), alike=0.7, **case)
    q, k, v, a, b, rate_H, bias_HK, states_N, turns, scale = made.inputs(wide, CPU)

    def op(turns: Turns, states_N: Tensor, *inputs_T: Tensor) -> Tensor:
        q, k, v, a, b = inputs_T
        return run(q, k, v, a, b, rate_H, bias_HK, states_N, turns, scale)

    return Bound(op, partial(_moved, op, states_N.to(wide)), states_N.to(wide), (q, k, v, a, b), turns)


def _moved(op: RecurrentOp, states_N: Tensor, pieces: Pieces, *inputs_T: Tensor) -> Any:
    return moved_by(pieces, op, states_N, *inputs_T)


def bound_wkv(rows: Sequence[int], run: Run = wkv.wkv, **case: Any) -> Bound:
    wide, case = sized(wkv.wkv, run, case, channels=5)
    made = WkvCase(tuple(rows), large=30.0, **case)
    k, v, decay_X, bonus_X, states_N, turns = made.inputs(wide, CPU)
    decay_X = decay_X.to(wide)

    def op(turns: Turns, states_N: Tensor, k_TX: Tensor, v_TX: Tensor) -> Tensor:
        return run(k_TX, v_TX, decay_X, bonus_X, states_N, turns)

    def tells(pieces: Pieces, *inputs_T: Tensor) -> Any:
        return weighed_by(pieces, decay_X, pieces.ran(op, states_N.to(wide), *inputs_T))

    return Bound(op, tells, states_N.to(wide), (k, v), turns)


def bound_conv(width: int, rows: Sequence[int], run: Run = conv.causal_conv, **case: Any) -> Bound:
    wide, case = sized(conv.causal_conv, run, {"channels": 32, **case}, channels=5)
    made = ConvCase(tuple(rows), width=width, bias=True, **case)
    x, weight_XW, bias_X, tails_N, turns, activation = made.inputs(wide, CPU)

    def op(turns: Turns, states_N: Tensor, x_TX: Tensor) -> Tensor:
        return run(x_TX, weight_XW, bias_X, states_N, turns, activation)

    def tells(pieces: Pieces, x_TX: Tensor) -> Any:
        return shifted_by(pieces, x_TX, width - 1)

    return Bound(op, tells, tails_N.to(wide), (x,), turns)


OPS: dict[str, Callable[..., Bound]] = {
    "ssd": bound_ssd,
    "selective_scan": bound_selective,
    "linear_attention, channels": partial(bound_linear, "channel"),
    "linear_attention, tokens": partial(bound_linear, "token"),
    "linear_attention, heads": partial(bound_linear, "head"),
    "gated_delta": bound_gated,
    "delta_attention": bound_delta,
    "wkv": bound_wkv,
    "causal_conv": partial(bound_conv, 4),
    "causal_conv of the last token": partial(bound_conv, 2),
}


def divided(
    bound: Bound, ranks: int, pieces: list[Piece], short: int = 0, told: int = TOLD_BYTES
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs of all tokens, and the states that each rank has at last."""
    owner_T = torch.cat([torch.full((piece.tokens,), piece.rank) for piece in pieces] or [torch.zeros(0)])

    def work(ring: Ring) -> tuple[Tensor, Tensor]:
        own_T, states_N = (owner_T == ring.rank).nonzero()[:, 0], bound.states_N.clone()
        scan = PieceScan(ring, pieces, CPU, short, told)
        own = [x_T[: len(owner_T)][own_T] for x_T in bound.inputs_T]
        return scan.run(bound.turns, bound.op, bound.tells, states_N, *own), states_N

    found = on_ranks(ranks, work)
    outputs_T = found[0][0].new_zeros(len(owner_T), *found[0][0].shape[1:])
    for rank, (part_T, _) in enumerate(found):
        outputs_T[owner_T == rank] = part_T
    return outputs_T, [states_N for _, states_N in found]


def check(bound: Bound, ranks: int, pieces: list[Piece], short: int = 0, told: int = TOLD_BYTES) -> None:
    want_N = bound.states_N.clone()
    want_T = bound.op(bound.turns, want_N, *bound.inputs_T)
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
        own = [x_T[: sum(rows)].tensor_split(bounds_of(sum(rows), ranks)[1:-1])[axis.rank] for x_T in bound.inputs_T]
        PieceScan(ring, pieces, CPU, told=10 * each).run(
            bound.turns, bound.op, bound.tells, bound.states_N.clone(), *own
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

    def wrong(pieces: Pieces, *inputs_T: Tensor) -> Any:
        told = bound.tells(pieces, *inputs_T)
        return type(told)(*(1.5 * x if x.is_floating_point() else x for x in vars(told).values()))

    pieces = list(pieces_of([16], [0], bounds_of(16, 2)))
    right_T, wrong_T = (divided(each, 2, pieces)[0] for each in (bound, bound._replace(tells=wrong)))
    assert torch.equal(right_T[:8], wrong_T[:8])
    assert not torch.allclose(right_T[8:], wrong_T[8:])


IMPLEMENTED: dict[str, Op[Any]] = {
    "ssd": ssd.SSD,
    "selective_scan": selective.SELECTIVE_SCAN,
    "linear_attention, channels": linear.LINEAR_ATTENTION,
    "gated_delta": gated.GATED_DELTA,
    "delta_attention": delta.DELTA_ATTENTION,
    "wkv": wkv.WKV,
    "causal_conv": conv.CAUSAL_CONV,
}


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("name", IMPLEMENTED)
def test_kernels_run_pieces_as_they_run_rows(name: str, kernel: str) -> None:
    """In float32: pieces of one token and of more than a chunk, on a single rank, beside a row that is short."""
    if kernel == "triton":
        pytest.importorskip("triton")
    run = IMPLEMENTED[name].choose(Platform.of(CPU), kernel)
    bound = OPS[name]([75, 1], run=run, marks=(70, 0), fresh=(1,))
    pieces = [Piece(0, 0, 1), Piece(0, 0, 69, marked=True), Piece(0, 0, 5), Piece(0, 1, 1)]
    want_N, got_N = bound.states_N.clone(), bound.states_N.clone()
    want_T = bound.op(bound.turns, want_N, *bound.inputs_T)
    got_T = PieceScan(SOLO, pieces, CPU).run(bound.turns, bound.op, bound.tells, got_N, *bound.inputs_T)
    torch.testing.assert_close(got_T, want_T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got_N[1:], want_N[1:], rtol=1e-4, atol=1e-4, equal_nan=True)
