"""An exchange of many tokens over peer memory, at the bandwidth of the link. `parallel/exchange.py` has the contract.

A rank writes rows directly to the ranks that need them: tokens into the places of the ranks that hold their experts,
which multiply them from there, and results into the table of the token's own rank. Behind its rows each program writes
the number of the message, a flag, to every rank, and waits for the flags of the programs with its number. Sending and
receiving may be launches of their own, with as many programs each.

No row is overwritten before it was read. A rank that dispatches again has the flags of all ranks' combine, and each
rank combines after its products. A rank that combines has the flags of all ranks' dispatch, and each rank dispatches
after its last sums.

Legend:
    T  this rank's tokens
    N  places: all ranks' capacities
    M  model width
    K  experts of a token
    R  ranks
    P  programs
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.ranks.all_reduce.peers import PROGRAMS

BLOCK = 2048  # numbers of a row that a program copies at once


class Room(NamedTuple):
    """The memory of one rank, by the offsets of its parts in bytes: tokens with their experts and weights, results, and
    the flags of dispatch and of combine, int32 [R, P] each. It begins as zeros."""

    experts: int
    weights: int
    results: int
    dispatched: int
    combined: int
    size: int

    @staticmethod
    def of(ranks: int, capacity: int, width: int, used: int, itemsize: int) -> Room:
        """Return the offsets for at most `capacity` tokens of each rank."""
        rows, heads, flags = ranks * capacity * width * itemsize, 4 * ranks * capacity * used, 4 * ranks * PROGRAMS
        ends, at = [], 0
        for size in (rows, heads, heads, rows, flags, flags):
            at += -(-size // 256) * 256
            ends.append(at)
        return Room(*ends)


class Rooms(NamedTuple):
    """The memory of all ranks, as one of them sees it.

    memory: this rank's own, uint8. base_R: int64, where this rank sees that of each rank. epoch_P: int32, how many
    messages each program has sent so far.
    """

    memory: Tensor
    base_R: Tensor
    epoch_P: Tensor
    rank: int
    size: int
    room: Room


def dispatch(
    x_TM: Tensor, expert_TK: Tensor, weight_TK: Tensor, held: int, capacity: int, rooms: Rooms, *, receives: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x_NM, expert_NK, weight_NK) of `Arrived`. They are views of this rank's memory until the next one.
    receives: wait for the other ranks' tokens; otherwise `receive` does."""
    x_TM, expert_TK, weight_TK = x_TM.contiguous(), expert_TK.contiguous(), weight_TK.contiguous()
    (tokens, width), used, room = x_TM.shape, expert_TK.shape[1], rooms.room
    dispatch_kernel[(min(capacity, PROGRAMS),)](
        x_TM, expert_TK, weight_TK, rooms.base_R, rooms.epoch_P, tokens, capacity, held, room.experts, room.weights,
        room.dispatched, M=width, K=used, KP=triton.next_power_of_2(used), BLOCK=_block(width), RANK=rooms.rank,
        SIZE=rooms.size, PROGRAMS=PROGRAMS, RECEIVES=receives, num_warps=8, **launch_options(x_TM.device),
    )  # fmt: skip
    places, memory = rooms.size * capacity, rooms.memory
    x_NM = memory[: places * width * x_TM.element_size()].view(x_TM.dtype).view(places, width)
    expert_NK = memory[room.experts :][: 4 * places * used].view(torch.int32).view(places, used)
    return x_NM, expert_NK, memory[room.weights :][: 4 * places * used].view(torch.float32).view(places, used)


def receive(capacity: int, rooms: Rooms) -> None:
    """Wait for the other ranks' tokens of a `dispatch` that did not."""
    receive_kernel[(min(capacity, PROGRAMS),)](
        rooms.base_R, rooms.epoch_P, rooms.room.dispatched, RANK=rooms.rank, SIZE=rooms.size, PROGRAMS=PROGRAMS,
        num_warps=1, **launch_options(rooms.memory.device),
    )  # fmt: skip


def combine(
    y_NM: Tensor, expert_NK: Tensor, sent_TK: Tensor, held: int, capacity: int, add_TM: Tensor | None, rooms: Rooms
) -> Tensor:
    """Return this rank's sums of all ranks' results, as `Exchange.combine` does: [T, M]."""
    return _combine(y_NM, expert_NK, sent_TK, held, capacity, add_TM, rooms, sends=True)


def send_back(y_NM: Tensor, expert_NK: Tensor, held: int, capacity: int, rooms: Rooms) -> None:
    """Send results to the ranks of their tokens; `add_up` receives."""
    y_NM = y_NM.contiguous()
    _launch(
        y_NM, expert_NK, expert_NK[:0], y_NM, y_NM[:0], held, capacity, rooms, SENDS=True, RECEIVES=False, ADD=False
    )


def add_up(
    y_NM: Tensor, expert_NK: Tensor, sent_TK: Tensor, held: int, capacity: int, add_TM: Tensor | None, rooms: Rooms
) -> Tensor:
    """Return the sums of `combine` behind a `send_back` of the same results."""
    return _combine(y_NM, expert_NK, sent_TK, held, capacity, add_TM, rooms, sends=False)


def _combine(
    y_NM: Tensor, expert_NK: Tensor, sent_TK: Tensor, held: int, capacity: int, add_TM: Tensor | None, rooms: Rooms,
    *, sends: bool,
) -> Tensor:  # fmt: skip
    y_NM, sent_TK = y_NM.contiguous(), sent_TK.contiguous()
    y_TM, add = y_NM.new_empty(len(sent_TK), y_NM.shape[1]), y_NM if add_TM is None else add_TM.contiguous()
    parts = {"SENDS": sends, "RECEIVES": True, "ADD": add_TM is not None}
    _launch(y_NM, expert_NK, sent_TK, add, y_TM, held, capacity, rooms, **parts)
    return y_TM


def _launch(
    y_NM: Tensor, expert_NK: Tensor, sent_TK: Tensor, add: Tensor, y_TM: Tensor, held: int, capacity: int,
    rooms: Rooms, **parts: bool,
) -> None:  # fmt: skip
    width, used, room = y_NM.shape[1], sent_TK.shape[1], rooms.room
    combine_kernel[(min(capacity, PROGRAMS),)](
        y_NM, expert_NK, sent_TK, add, y_TM, rooms.base_R, rooms.epoch_P, len(y_TM), capacity, held, room.results,
        room.combined, M=width, K=used, KP=triton.next_power_of_2(used), BLOCK=_block(width), RANK=rooms.rank,
        SIZE=rooms.size, PROGRAMS=PROGRAMS, **parts, num_warps=8, **launch_options(y_NM.device),
    )  # fmt: skip


def _block(width: int) -> int:
    return min(BLOCK, triton.next_power_of_2(width))


@triton.jit
def dispatch_kernel(
    x_ptr, expert_ptr, weight_ptr, base_ptr, epoch_ptr, tokens, capacity, held, experts_at, weights_at, flags_at,
    M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr, RECEIVES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write every token of this program to the ranks that want it."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    message = tl.load(epoch_ptr + program) + 1
    at_K, at_B = tl.arange(0, KP), tl.arange(0, BLOCK)
    token = program.to(tl.int64)
    while token < capacity:
        live_K = (at_K < K) & (at_K * 0 + token < tokens)
        row, place = token * M, RANK * capacity + token
        expert_K = tl.load(expert_ptr + token * K + at_K, mask=live_K, other=-1)
        weight_K = tl.load(weight_ptr + token * K + at_K, mask=live_K, other=0.0)
        for rank in tl.static_range(SIZE):
            base = tl.load(base_ptr + rank)
            own_K = expert_K - rank * held
            there_K = live_K & (own_K >= 0) & (own_K < held)
            experts = (base + experts_at).to(tl.pointer_type(tl.int32)) + place * K
            weights = (base + weights_at).to(tl.pointer_type(tl.float32)) + place * K
            tl.store(experts + at_K, tl.where(there_K, own_K, held), mask=at_K < K)
            tl.store(weights + at_K, weight_K, mask=at_K < K)
            if tl.max(there_K.to(tl.int32), 0) > 0:
                there = base.to(tl.pointer_type(x_ptr.dtype.element_ty)) + place * M
                for start in tl.static_range(0, M, BLOCK):
                    kept_B = start + at_B < M
                    x_B = tl.load(x_ptr + row + start + at_B, mask=kept_B, other=0.0)
                    tl.store(there + start + at_B, x_B, mask=kept_B)
        token += tl.num_programs(0)
    _tell(base_ptr, flags_at, message, RANK, SIZE, PROGRAMS)
    if RECEIVES:
        _meet(base_ptr, flags_at, epoch_ptr, message, RANK, SIZE, PROGRAMS)


@triton.jit
def receive_kernel(
    base_ptr, epoch_ptr, flags_at, RANK: tl.constexpr, SIZE: tl.constexpr, PROGRAMS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Wait for the tokens of a dispatch that has not waited itself."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    message = tl.load(epoch_ptr + tl.program_id(0)) + 1
    _meet(base_ptr, flags_at, epoch_ptr, message, RANK, SIZE, PROGRAMS)


@triton.jit
def combine_kernel(
    y_ptr, expert_ptr, sent_ptr, add_ptr, out_ptr, base_ptr, epoch_ptr, tokens, capacity, held, results_at, flags_at,
    M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr, ADD: tl.constexpr, SENDS: tl.constexpr, RECEIVES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write results to the tokens' ranks, then add up what came for this rank's tokens."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    message = tl.load(epoch_ptr + program)  # that of this step's dispatch, in flags of its own
    kind: tl.constexpr = out_ptr.dtype.element_ty
    at_K, at_B = tl.arange(0, KP), tl.arange(0, BLOCK)
    if SENDS:
        token = program.to(tl.int64)
        while token < capacity:
            for rank in tl.static_range(SIZE):
                place = rank * capacity + token
                own_K = tl.load(expert_ptr + place * K + at_K, mask=at_K < K, other=held)
                if tl.max((own_K < held).to(tl.int32), 0) > 0:
                    there = (tl.load(base_ptr + rank) + results_at).to(tl.pointer_type(kind))
                    there += (RANK * capacity + token) * M
                    for start in tl.static_range(0, M, BLOCK):
                        kept_B = start + at_B < M
                        y_B = tl.load(y_ptr + place * M + start + at_B, mask=kept_B, other=0.0)
                        tl.store(there + start + at_B, y_B, mask=kept_B)
            token += tl.num_programs(0)
        _tell(base_ptr, flags_at, message, RANK, SIZE, PROGRAMS)
    if RECEIVES:
        _meet(base_ptr, flags_at, epoch_ptr, message, RANK, SIZE, PROGRAMS)
        results = (tl.load(base_ptr + RANK) + results_at).to(tl.pointer_type(kind))
        token = program.to(tl.int64)
        while token < tokens:
            sent_K = tl.load(sent_ptr + token * K + at_K, mask=at_K < K, other=-1)
            for start in tl.static_range(0, M, BLOCK):
                kept_B = start + at_B < M
                y_B = tl.zeros((BLOCK,), tl.float32)
                for rank in tl.static_range(SIZE):
                    there_K = (at_K < K) & (sent_K >= rank * held) & (sent_K < (rank + 1) * held)
                    asked_B = kept_B & (at_B * 0 + tl.max(there_K.to(tl.int32), 0) > 0)
                    there = results + (rank * capacity + token) * M + start
                    # Past the first cache, which may hold what lay there before
                    y_B += tl.load(there + at_B, mask=asked_B, other=0.0, cache_modifier=".cg").to(tl.float32)
                if ADD:
                    y_B += tl.load(add_ptr + token * M + start + at_B, mask=kept_B, other=0.0).to(tl.float32)
                tl.store(out_ptr + token * M + start + at_B, y_B.to(kind), mask=kept_B)
            token += tl.num_programs(0)


@triton.jit
def _tell(base_ptr, flags_at, message, RANK: tl.constexpr, SIZE: tl.constexpr, PROGRAMS: tl.constexpr):
    """Tell all ranks' programs of this number that this one's rows are written."""
    tl.debug_barrier()  # the flag comes behind the rows of all threads
    for rank in tl.static_range(SIZE):
        flags = (tl.load(base_ptr + rank) + flags_at).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + RANK * PROGRAMS + tl.program_id(0), message, sem="release", scope="sys")


@triton.jit
def _meet(base_ptr, flags_at, epoch_ptr, message, RANK: tl.constexpr, SIZE: tl.constexpr, PROGRAMS: tl.constexpr):
    """Wait until the rows of all ranks' programs of this number are written."""
    program = tl.program_id(0)
    own = (tl.load(base_ptr + RANK) + flags_at).to(tl.pointer_type(tl.int32))
    for rank in tl.static_range(SIZE):
        while tl.atomic_add(own + rank * PROGRAMS + program, 0, sem="acquire", scope="sys") != message:
            pass
    tl.debug_barrier()
    tl.store(epoch_ptr + program, message)


def _aot() -> tuple[AotKernel, ...]:
    common = {"base_ptr": "*i64", "epoch_ptr": "*i32", "tokens": "i32", "capacity": "i32", "held": "i32"}
    constants = {"M": 4096, "K": 8, "KP": 8, "BLOCK": BLOCK, "RANK": 1, "SIZE": 2, "PROGRAMS": PROGRAMS}
    sent = {"x_ptr": "*bf16", "expert_ptr": "*i32", "weight_ptr": "*fp32"}
    back = {"y_ptr": "*bf16", "expert_ptr": "*i32", "sent_ptr": "*i32", "add_ptr": "*bf16", "out_ptr": "*bf16"}
    into = dict.fromkeys(("experts_at", "weights_at", "flags_at"), "i64:16")
    out = dict.fromkeys(("results_at", "flags_at"), "i64:16")
    both = {"num_warps": 8, "hot": True, "waits": "ranks", "archs": ("sm_90",)}
    whole = {**constants, "SENDS": True, "RECEIVES": True, "ADD": True}
    meets = {"base_ptr": "*i64", "epoch_ptr": "*i32", "flags_at": "i64:16"}
    among = {name: constants[name] for name in ("RANK", "SIZE", "PROGRAMS")}
    return (
        AotKernel(dispatch_kernel, {**sent, **common, **into}, {**constants, "RECEIVES": True}, **both),
        AotKernel(combine_kernel, {**back, **common, **out}, whole, **both),
        AotKernel(receive_kernel, meets, among, **{**both, "num_warps": 1}),
    )


AOT = _aot()
