"""Sums of middle sizes over the GPUs of one machine: rows are written to where they are added up, and a flag says so.

Sums in words (triton.py) double their bytes, so that no flag is needed. From some size on the bytes cost more than a
flag does. Every program of a rank talks to its counterparts alone, so there is no barrier of all programs:

    one shot    every rank writes its rows to all others, and adds up what it got. One way over the link; a rank sends
                (n - 1) times the bytes.
    two shots   rows are dealt out. Ranks write each row to its owner, which adds it up and writes the sum to all. Two
                ways; a rank sends 2 (n - 1) / n times the bytes.

For two ranks the bytes are the same, so two ranks take one shot.

The memory of a message has two phases, for the reason that triton.py gives. Sums are in float32 in the order of ranks,
and are rounded once: all ranks get the same bits, and the same as from words.

Legend:
    T  tokens
    M  width of a row
    R  ranks
    P  programs
    X  numbers of a row, padded to a power of two
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

CAPACITY = 32_768  # numbers of a program's rows
REGION = 3 * CAPACITY  # of a program in a phase: what is sent to be added up, and behind it sums
DATA = 2 * PROGRAMS * REGION * 2  # bytes before the flags
WIDEST = 8192  # numbers of a row, which a program holds in registers


class Memory(NamedTuple):
    """The memory of all ranks, as one of them sees it: two phases of bfloat16 or float16 [program, REGION], then flags,
    int32 [shot, writing rank, program], each the number of the last message that is there.

    base_R: int64, where this rank sees the memory of each rank.
    epoch_P: int32, how many messages each program has sent so far.
    """

    base_R: Tensor
    epoch_P: Tensor
    rank: int
    size: int


def memory_bytes(size: int) -> int:
    """Return the bytes of a rank's memory among so many ranks. It begins as zeros."""
    return DATA + 2 * size * PROGRAMS * 4


def memory(bases: list[int], rank: int, device: torch.device) -> Memory:
    """Return the memory of all ranks for one that sees them at these addresses."""
    base_R = torch.tensor(bases, dtype=torch.int64, device=device)
    return Memory(base_R, torch.zeros(PROGRAMS, dtype=torch.int32, device=device), rank, len(bases))


def shots_of(size: int) -> int:
    """Return in how many shots so many ranks add up."""
    return 1 if size == 2 else 2


def fits_rows(x_TM: Tensor, size: int, shots: int | None = None) -> bool:
    """Return True if a launch can add up rows like these, and normalize them."""
    tokens, width = x_TM.shape
    halves = x_TM.dtype in (torch.bfloat16, torch.float16)
    if not halves or width % 8 or width > WIDEST or not tokens:
        return False
    each = -(-tokens // PROGRAMS)
    if (shots or shots_of(size)) == 1:
        return size == 2 and each * width <= CAPACITY  # the memory holds what two ranks write
    return each * width <= CAPACITY and -(-each // size) * width <= 2 * CAPACITY // size


def fits(x: Tensor, size: int, shots: int | None = None) -> bool:
    """Return True if a launch can add up tensors like this one."""
    return x.numel() > 0 and x.is_contiguous() and fits_rows(rows_of(x), size, shots)


def rows_of(x: Tensor) -> Tensor:
    """Return a tensor as rows that keep many programs at work, if it can be cut so; as one row otherwise."""
    width = min(WIDEST, max(1024, triton.next_power_of_2(-(-x.numel() // PROGRAMS))))
    return x.view(-1, width) if x.numel() % width == 0 else x.view(1, -1)


def all_reduce(x: Tensor, memory: Memory, shots: int | None = None) -> Tensor:
    """Return the sum of all ranks' tensors, which have the same shape."""
    y, rows_TM = torch.empty_like(x), rows_of(x)
    _launch(rows_TM, None, None, 0.0, y, y, memory, shots)
    return y


def all_reduce_norm(
    x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float, memory: Memory, shots: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return (y, s) of the op `rms_norm` for the sum of all ranks' x."""
    x_TM = x_TM.contiguous()
    y_TM, s_TM = torch.empty_like(x_TM), torch.empty_like(x_TM)
    _launch(x_TM, residual_TM, weight_M, eps, y_TM, s_TM, memory, shots)
    return y_TM, s_TM


def _launch(
    x_TM: Tensor,
    residual_TM: Tensor | None,
    weight_M: Tensor | None,
    eps: float,
    y: Tensor,
    s: Tensor,
    memory: Memory,
    shots: int | None,
) -> None:
    (tokens, width), nothing = x_TM.shape, x_TM
    each = triton.cdiv(tokens, PROGRAMS)
    residual = nothing if residual_TM is None else residual_TM
    direct_kernel[(triton.cdiv(tokens, each),)](
        x_TM, residual, nothing if weight_M is None else weight_M, y, s, memory.base_R, memory.epoch_P,
        residual.stride(0), eps, tokens, each,
        M=width, X=triton.next_power_of_2(width), RANK=memory.rank, SIZE=memory.size,
        SHOTS=shots or shots_of(memory.size), CAPACITY=CAPACITY, PROGRAMS=PROGRAMS, RESIDUAL=residual_TM is not None,
        NORM=weight_M is not None, num_warps=8 if width <= 4096 else 16, **launch_options(x_TM.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "each"])
def direct_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, s_ptr, base_ptr, epoch_ptr, residual_stride, eps, tokens, each,
    M: tl.constexpr, X: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, SHOTS: tl.constexpr,
    CAPACITY: tl.constexpr, PROGRAMS: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add up `each` rows of every rank in a program, and with NORM add the residual and normalize."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    message = tl.load(epoch_ptr + program) + 1
    at_X = tl.arange(0, X)
    kept_X = at_X < M
    first = program * each
    count = tl.minimum(each, tokens - first)
    region = ((message & 1) * PROGRAMS + program).to(tl.int64) * (3 * CAPACITY)
    x_ptr += first.to(tl.int64) * M
    kind: tl.constexpr = x_ptr.dtype.element_ty
    for row in range(count):
        x_X = tl.load(x_ptr + row * M + at_X, mask=kept_X, other=0.0)
        if SHOTS == 1:
            for rank in tl.static_range(SIZE):
                if rank != RANK:
                    tl.store(_of(base_ptr, rank, kind) + (region + RANK * CAPACITY) + row * M + at_X, x_X, mask=kept_X)
        else:
            owner = (row + program) % SIZE
            place = region + RANK * (2 * CAPACITY // SIZE) + row // SIZE * M
            if owner != RANK:
                tl.store(_of(base_ptr, owner, kind) + place + at_X, x_X, mask=kept_X)
    _signal(base_ptr, message, 0, RANK, SIZE, CAPACITY, PROGRAMS)
    _await(base_ptr, message, 0, RANK, SIZE, CAPACITY, PROGRAMS)
    own = _of(base_ptr, RANK, kind) + region
    if SHOTS == 2:
        for row in range(count):
            if (row + program) % SIZE == RANK:
                sum_X = _sum(x_ptr + row * M, own + row // SIZE * M, at_X, kept_X, 2 * CAPACITY // SIZE, RANK, SIZE)
                sum_X = sum_X.to(kind)
                for rank in tl.static_range(SIZE):
                    place = region + 2 * CAPACITY + row * M
                    tl.store(_of(base_ptr, rank, kind) + place + at_X, sum_X, mask=kept_X)
        _signal(base_ptr, message, 1, RANK, SIZE, CAPACITY, PROGRAMS)
        _await(base_ptr, message, 1, RANK, SIZE, CAPACITY, PROGRAMS)
    for row in range(count):
        token = (first + row).to(tl.int64)
        if SHOTS == 1:
            sum_X = _sum(x_ptr + row * M, own + row * M, at_X, kept_X, CAPACITY, RANK, SIZE).to(kind)
        else:
            sum_X = tl.load(own + 2 * CAPACITY + row * M + at_X, mask=kept_X, other=0.0, cache_modifier=".cg")
        if NORM:
            if RESIDUAL:
                residual_X = tl.load(residual_ptr + token * residual_stride + at_X, mask=kept_X, other=0.0)
                sum_X = (sum_X.to(tl.float32) + residual_X.to(tl.float32)).to(kind)
            tl.store(s_ptr + token * M + at_X, sum_X, mask=kept_X)
            s_X = sum_X.to(tl.float32)
            scale = tl.rsqrt(tl.sum(s_X * s_X) / M + eps)
            weight_X = tl.load(weight_ptr + at_X, mask=kept_X, other=0.0).to(tl.float32)
            sum_X = (s_X * scale * weight_X).to(kind)
        tl.store(y_ptr + token * M + at_X, sum_X, mask=kept_X)
    tl.debug_barrier()  # a warp that is late has yet to read the old number
    tl.store(epoch_ptr + program, message)


@triton.jit
def _of(base_ptr, rank, kind: tl.constexpr):
    """Return the beginning of a rank's memory, which is a multiple of 16 bytes."""
    return tl.multiple_of(tl.multiple_of(tl.load(base_ptr + rank), 16).to(tl.pointer_type(kind)), 16)


@triton.jit
def _sum(x_ptr, inbox_ptr, at_X, kept_X, STRIDE: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Return the sum of a row over ranks, in their order, float32."""
    sum_X = tl.zeros_like(at_X).to(tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            x_X = tl.load(x_ptr + at_X, mask=kept_X, other=0.0)
        else:
            x_X = tl.load(inbox_ptr + rank * STRIDE + at_X, mask=kept_X, other=0.0, cache_modifier=".cg")
        sum_X += x_X.to(tl.float32)
    return sum_X


@triton.jit
def _flag(base_ptr, at, writer, shot, SIZE: tl.constexpr, CAPACITY: tl.constexpr, PROGRAMS: tl.constexpr):
    """Return the address of rank `at`'s flag for the newest message that `writer` has sent to this program."""
    flags = _of(base_ptr, at, tl.int32) + PROGRAMS * (3 * CAPACITY)  # behind two phases of two bytes a number
    return flags + (shot * SIZE + writer) * PROGRAMS + tl.program_id(0)


@triton.jit
def _signal(
    base_ptr, message, shot,
    RANK: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Tell the other ranks that everything the program wrote before is there."""
    tl.debug_barrier()  # one thread tells it, after all threads wrote
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            flag = _flag(base_ptr, rank, RANK, shot, SIZE, CAPACITY, PROGRAMS)
            tl.atomic_xchg(flag, message, sem="release", scope="sys")


@triton.jit
def _await(
    base_ptr, message, shot,
    RANK: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Wait until all ranks have told so. One that is ahead may have told of a later message already."""
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            flag = _flag(base_ptr, RANK, rank, shot, SIZE, CAPACITY, PROGRAMS)
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - message < 0:
                pass
    tl.debug_barrier()


def _aot(shots: int, size: int, *, norm: bool) -> AotKernel:
    pointers = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "y_ptr", "s_ptr"), "*bf16")
    numbers = {"residual_stride": "i32:16", "eps": "fp32", "tokens": "i32", "each": "i32"}
    constants = {"M": 4096, "X": 4096, "RANK": 1, "SIZE": size, "SHOTS": shots, "RESIDUAL": norm, "NORM": norm}
    return AotKernel(
        direct_kernel,
        {**pointers, "base_ptr": "*i64", "epoch_ptr": "*i32", **numbers},
        {**constants, "CAPACITY": CAPACITY, "PROGRAMS": PROGRAMS},
        num_warps=8,
        hot=True,
        waits="ranks",
        archs=("sm_90",),
    )


AOT = (_aot(1, 2, norm=True), _aot(1, 2, norm=False), _aot(2, 4, norm=True))
