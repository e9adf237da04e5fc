"""An exchange of few tokens over peer memory, at the latency of one write. `parallel/exchange.py` has the contract.

Each token has a program. It writes a header (the token's experts there, and their weights) into the inbox of every
rank, and the token's row into those of ranks that hold experts of it. Every 32 bits carry the number of their message
(`kernels/ranks/all_reduce`), so a reader sees that they have arrived. Then it reads what the other ranks' programs of
the same number have written. Their headers say whether a row follows. In combine both sides know that already.

Sending and receiving may be launches of their own, between which other work runs. The number of the message rises when
it is received.

Dispatch and combine have an inbox each, of two phases. In every dispatch a program receives a message from all ranks,
and all ranks combine between two dispatches. So when a rank writes message n + 2, message n has been read.

Legend:
    T  this rank's tokens
    N  places: all ranks' capacities
    M  model width
    K  experts of a token
    W  words of 32 bits of a row
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import INTERPRETED, launch_options
from ridgeline.kernels.ranks.all_reduce.peers import PROGRAMS, WORDS, Peers
from ridgeline.kernels.ranks.all_reduce.triton import number, packed, received, send

LARGEST = 32  # tokens of a rank; more take longer than rows do: 64 took 26 µs on two H200s, and as rows 18 on two H100s


def fits(x_TM: Tensor, used: int, capacity: int) -> bool:
    """Return True if this can exchange tokens like these."""
    width = x_TM.shape[1]
    halves = x_TM.dtype in (torch.bfloat16, torch.float16)
    return halves and width % 2 == 0 and capacity <= LARGEST and width // 2 + 2 * triton.next_power_of_2(used) <= WORDS


Came = tuple[Tensor, Tensor, Tensor]


def dispatch(
    x_TM: Tensor, expert_TK: Tensor, weight_TK: Tensor, held: int, capacity: int, peers: Peers, *, receives: bool = True
) -> Came:
    """Return (x_NM, expert_NK, weight_NK) of `Arrived`. receives: wait for the other ranks' tokens; otherwise `receive`
    does."""
    x_TM, expert_TK, weight_TK = x_TM.contiguous(), expert_TK.contiguous(), weight_TK.contiguous()
    width, used, places = x_TM.shape[1], expert_TK.shape[1], peers.size * capacity
    came = x_TM.new_empty(places, width), expert_TK.new_empty(places, used), weight_TK.new_empty(places, used)
    _dispatch((x_TM, expert_TK, weight_TK), came, held, capacity, peers, sends=True, receives=receives)
    return came


def receive(came: Came, held: int, capacity: int, peers: Peers) -> None:
    """Wait for the other ranks' tokens of a `dispatch` that did not."""
    _dispatch(came, came, held, capacity, peers, sends=False, receives=True)


def _dispatch(sent: Came, came: Came, held: int, capacity: int, peers: Peers, *, sends: bool, receives: bool) -> None:
    (x_TM, expert_TK, weight_TK), (x_NM, expert_NK, weight_NK) = sent, came
    (tokens, width), used = x_TM.shape, expert_TK.shape[1]
    dispatch_kernel[(capacity,)](
        x_TM.view(torch.int32), expert_TK, weight_TK.view(torch.int32), x_NM.view(torch.int32), expert_NK,
        weight_NK.view(torch.int32), peers.base_R, peers.epoch_P, tokens, capacity, held,
        W=width // 2, WP=triton.next_power_of_2(width // 2), K=used, KP=triton.next_power_of_2(used), RANK=peers.rank,
        SIZE=peers.size, CAPACITY=WORDS, PROGRAMS=PROGRAMS, SENDS=sends, RECEIVES=receives, ASM=not INTERPRETED,
        num_warps=8, **launch_options(x_TM.device),
    )  # fmt: skip


def combine(
    y_NM: Tensor, expert_NK: Tensor, sent_TK: Tensor, held: int, capacity: int, add_TM: Tensor | None, peers: Peers
) -> Tensor:
    """Return this rank's sums of all ranks' results, as `Exchange.combine` does: [T, M]."""
    return _combine(y_NM, expert_NK, sent_TK, held, capacity, add_TM, peers, sends=True)


def send_back(y_NM: Tensor, expert_NK: Tensor, held: int, capacity: int, peers: Peers) -> None:
    """Send results to the ranks of their tokens; `add_up` receives."""
    y_NM, used = y_NM.contiguous(), expert_NK.shape[1]
    _combine_kernel(y_NM, expert_NK, expert_NK[:0], y_NM, y_NM[:0], held, capacity, peers, used, True, False, False)


def add_up(
    y_NM: Tensor, expert_NK: Tensor, sent_TK: Tensor, held: int, capacity: int, add_TM: Tensor | None, peers: Peers
) -> Tensor:
    """Return the sums of `combine` behind a `send_back` of the same results."""
    return _combine(y_NM, expert_NK, sent_TK, held, capacity, add_TM, peers, sends=False)


def _combine(
    y_NM: Tensor, expert_NK: Tensor, sent_TK: Tensor, held: int, capacity: int, add_TM: Tensor | None, peers: Peers,
    *, sends: bool,
) -> Tensor:  # fmt: skip
    y_NM, sent_TK = y_NM.contiguous(), sent_TK.contiguous()
    y_TM, add = y_NM.new_empty(len(sent_TK), y_NM.shape[1]), y_NM if add_TM is None else add_TM.contiguous()
    adds, used = add_TM is not None, sent_TK.shape[1]
    _combine_kernel(y_NM, expert_NK, sent_TK, add, y_TM, held, capacity, peers, used, sends, True, adds)
    return y_TM


def _combine_kernel(
    y_NM: Tensor, expert_NK: Tensor, sent_TK: Tensor, add: Tensor, y_TM: Tensor, held: int, capacity: int,
    peers: Peers, used: int, sends: bool, receives: bool, adds: bool,
) -> None:  # fmt: skip
    width = y_NM.shape[1]
    combine_kernel[(capacity,)](
        y_NM.view(torch.int32), expert_NK, sent_TK, add.view(torch.int32), y_TM.view(torch.int32), peers.base_R,
        peers.epoch_P, len(y_TM), capacity, held, W=width // 2, WP=triton.next_power_of_2(width // 2), K=used,
        KP=triton.next_power_of_2(used), RANK=peers.rank, SIZE=peers.size, CAPACITY=WORDS, PROGRAMS=PROGRAMS,
        BF16=y_NM.dtype == torch.bfloat16, ADD=adds, SENDS=sends, RECEIVES=receives, ASM=not INTERPRETED, num_warps=8,
        **launch_options(y_NM.device),
    )  # fmt: skip


@triton.jit
def dispatch_kernel(
    x_ptr, expert_ptr, weight_ptr, x_out_ptr, expert_out_ptr, weight_out_ptr, base_ptr, epoch_ptr, tokens, capacity,
    held, W: tl.constexpr, WP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RANK: tl.constexpr,
    SIZE: tl.constexpr, CAPACITY: tl.constexpr, PROGRAMS: tl.constexpr, SENDS: tl.constexpr, RECEIVES: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Send a token, and take one of each other rank. x and weights are seen as int32."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    at_W, at_K = tl.arange(0, WP), tl.arange(0, KP)
    row_W, head_K = at_W < W, at_K < K
    message = tl.load(epoch_ptr + token) + 1
    box = (message & 1) * SIZE * PROGRAMS * CAPACITY + token * CAPACITY
    if SENDS:
        live_K = head_K & (at_K * 0 + token < tokens)
        expert_K = tl.load(expert_ptr + token * K + at_K, mask=live_K, other=-1)
        weight_K = tl.load(weight_ptr + token * K + at_K, mask=live_K, other=0)
        x_W = tl.load(x_ptr + token * W + at_W, mask=row_W & (at_W * 0 + token < tokens), other=0)
        for rank in tl.static_range(SIZE):
            own_K = expert_K - rank * held
            there_K = live_K & (own_K >= 0) & (own_K < held)
            own_K = tl.where(there_K, own_K, held)
            if rank == RANK:
                place = RANK * capacity + token
                tl.store(expert_out_ptr + place * K + at_K, own_K, mask=head_K)
                tl.store(weight_out_ptr + place * K + at_K, weight_K, mask=head_K)
                tl.store(x_out_ptr + place * W + at_W, x_W, mask=row_W)
            else:
                wanted = tl.max(there_K.to(tl.int32), 0)
                inbox = tl.load(base_ptr + rank).to(tl.pointer_type(tl.int64)) + (box + RANK * PROGRAMS * CAPACITY)
                send(inbox + W + at_K, own_K, message, head_K, ASM)
                send(inbox + (W + KP) + at_K, weight_K, message, head_K, ASM)
                send(inbox + at_W, x_W, message, row_W & (at_W * 0 + wanted > 0), ASM)
    if RECEIVES:
        own = tl.load(base_ptr + RANK).to(tl.pointer_type(tl.int64)) + box
        for rank in tl.static_range(SIZE):
            if rank != RANK:
                inbox = own + rank * PROGRAMS * CAPACITY
                place = rank * capacity + token
                own_K = received(inbox + W + at_K, message, head_K, 1, ASM)
                weight_K = received(inbox + (W + KP) + at_K, message, head_K, 1, ASM)
                tl.store(expert_out_ptr + place * K + at_K, own_K, mask=head_K)
                tl.store(weight_out_ptr + place * K + at_K, weight_K, mask=head_K)
                wanted = tl.max((head_K & (own_K < held)).to(tl.int32), 0)
                wanted_W = row_W & (at_W * 0 + wanted > 0)
                tl.store(x_out_ptr + place * W + at_W, received(inbox + at_W, message, wanted_W, 1, ASM), mask=wanted_W)
        tl.debug_barrier()  # every warp has read the old number
        tl.store(epoch_ptr + token, message)


@triton.jit
def combine_kernel(
    y_ptr, expert_ptr, sent_ptr, add_ptr, out_ptr, base_ptr, epoch_ptr, tokens, capacity, held,
    W: tl.constexpr, WP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    CAPACITY: tl.constexpr, PROGRAMS: tl.constexpr, BF16: tl.constexpr, ADD: tl.constexpr, SENDS: tl.constexpr,
    RECEIVES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Send back the rows of a token of every rank, and add up those of this rank's token. Rows are seen as int32."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    at_W, at_K = tl.arange(0, WP), tl.arange(0, KP)
    row_W, head_K = at_W < W, at_K < K
    message = tl.load(epoch_ptr + token) + 1
    box = (message & 1) * SIZE * PROGRAMS * CAPACITY + token * CAPACITY
    if SENDS:
        for rank in tl.static_range(SIZE):
            if rank != RANK:
                place = rank * capacity + token
                own_K = tl.load(expert_ptr + place * K + at_K, mask=head_K, other=held)
                kept_W = row_W & (at_W * 0 + tl.max((own_K < held).to(tl.int32), 0) > 0)
                y_W = tl.load(y_ptr + place * W + at_W, mask=kept_W, other=0)
                inbox = tl.load(base_ptr + rank).to(tl.pointer_type(tl.int64)) + (box + RANK * PROGRAMS * CAPACITY)
                send(inbox + at_W, y_W, message, kept_W, ASM)
    if RECEIVES:
        live_K = head_K & (at_K * 0 + token < tokens)
        sent_K = tl.load(sent_ptr + token * K + at_K, mask=live_K, other=-1)
        low_W = tl.zeros((WP,), tl.float32)
        high_W = tl.zeros((WP,), tl.float32)
        own = tl.load(base_ptr + RANK).to(tl.pointer_type(tl.int64)) + box
        for rank in tl.static_range(SIZE):
            there_K = live_K & (sent_K >= rank * held) & (sent_K < (rank + 1) * held)
            kept_W = row_W & (at_W * 0 + tl.max(there_K.to(tl.int32), 0) > 0)
            if rank == RANK:
                y_W = tl.load(y_ptr + (RANK * capacity + token) * W + at_W, mask=kept_W, other=0)
            else:
                y_W = received(own + rank * PROGRAMS * CAPACITY + at_W, message, kept_W, 1, ASM)
            low_W += number(y_W & 0xFFFF, BF16)
            high_W += number((y_W >> 16) & 0xFFFF, BF16)
        out_W = row_W & (at_W * 0 + token < tokens)
        if ADD:
            add_W = tl.load(add_ptr + token * W + at_W, mask=out_W, other=0)
            low_W += number(add_W & 0xFFFF, BF16)
            high_W += number((add_W >> 16) & 0xFFFF, BF16)
        tl.store(out_ptr + token * W + at_W, packed(low_W, high_W, BF16), mask=out_W)
        tl.debug_barrier()  # every warp has read the old number
        tl.store(epoch_ptr + token, message)


def _aot() -> tuple[AotKernel, ...]:
    common = {"base_ptr": "*i64", "epoch_ptr": "*i32", "tokens": "i32", "capacity": "i32", "held": "i32"}
    constants = {"W": 1024, "WP": 1024, "K": 8, "KP": 8, "RANK": 1, "SIZE": 2, "CAPACITY": WORDS, "PROGRAMS": PROGRAMS}
    constants |= {"SENDS": True, "RECEIVES": True, "ASM": True}
    back = {"BF16": True, "ADD": True}
    there_ptrs = dict.fromkeys(
        ("x_ptr", "expert_ptr", "weight_ptr", "x_out_ptr", "expert_out_ptr", "weight_out_ptr"), "*i32"
    )
    back_ptrs = dict.fromkeys(("y_ptr", "expert_ptr", "sent_ptr", "add_ptr", "out_ptr"), "*i32")
    both = {"num_warps": 8, "hot": True, "waits": "ranks", "archs": ("sm_90",)}
    return (
        AotKernel(dispatch_kernel, {**there_ptrs, **common}, constants, **both),
        AotKernel(combine_kernel, {**back_ptrs, **common}, constants | back, **both),
        AotKernel(dispatch_kernel, {**there_ptrs, **common}, constants | {"SENDS": False}, **both),
        AotKernel(combine_kernel, {**back_ptrs, **common}, constants | back | {"SENDS": False}, **both),
    )


AOT = _aot()
