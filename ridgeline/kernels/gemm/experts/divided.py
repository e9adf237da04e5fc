"""The launch of experts that ranks divide, dispatch, products and combine together: its memory, its cut, and what it
supports. kernel.py has the device's side.

Legend:
    T  this rank's tokens
    M  model width
    E  experts of all ranks
    K  experts of a token
    P  pairs of a token and one of its experts, T · K, sorted by expert
    H  experts of this rank
    F  an expert's inner width
    G  2 F: the rows of gate, then those of up
    R  ranks
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.counters import COUNTERS, meeting
from ridgeline.kernels.base.launch import INTERPRETED, compute_capability, num_multiprocessors
from ridgeline.kernels.base.routing import UNGATED
from ridgeline.kernels.gemm.experts.choose import Tiles, row_tiles
from ridgeline.kernels.gemm.experts.divided_kernel import PROGRAMS, experts_kernel
from ridgeline.kernels.gemm.plain.choose import power_of_two
from ridgeline.kernels.gemm.route.op import Routes

WIDE = 2048  # numbers of a row that are moved at once
FEW = 128  # tokens of a rank up to which rows are sent one by one, each with its flag


class ExpertRoom(NamedTuple):
    """The memory of one rank, by the offsets of its parts in bytes. It begins as zeros. Rows of tokens lie at 0: [R,
    most, M].

    results: like rows, of sums that other ranks send back.
    heads, lists, starts: int32 [2, R, most, 3, K], [2, R, most K], [2, R, H + 1]; of each token its experts here, their
        weights' bits and its pairs' places; of each pair its token; of each expert where its pairs begin. The last two
        are in the order of the rank that sent them.
    told, arrived, returned: int32 [R, PROGRAMS], [R, most], [R, most]: the number of the launch whose headers, rows and
        results are there.
    """

    results: int
    heads: int
    lists: int
    starts: int
    told: int
    arrived: int
    returned: int
    size: int

    @staticmethod
    def of(ranks: int, most: int, width: int, used: int, held: int, itemsize: int) -> ExpertRoom:
        """Return the offsets for at most `most` tokens of each rank."""
        rows, lists, flags = ranks * most * width * itemsize, 2 * ranks * most * used * 4, ranks * most * 4
        ends, at = [], 0
        for size in (rows, rows, 3 * lists, lists, 2 * ranks * (held + 1) * 4, ranks * PROGRAMS * 4, flags, flags):
            at += -(-size // 256) * 256
            ends.append(at)
        return ExpertRoom(*ends)


class RoomLimits(NamedTuple):
    """The use of a memory: at most so many tokens of a rank, and layers of this width, with so many experts of a token
    and of this rank. Layers that differ would write headers over each other's."""

    most: int
    width: int
    used: int
    held: int


class ExpertRooms(NamedTuple):
    """The memory of all ranks, as one of them sees it.

    base_R: int64, where this rank sees that of each rank.
    epoch: int32 [1], how many launches there have been.
    """

    base_R: Tensor
    epoch: Tensor
    rank: int
    size: int
    limits: RoomLimits
    room: ExpertRoom


class DividedCut(NamedTuple):
    """A cut of the kernel: tiles as `Tiles` has them, and how many programs a multiprocessor runs together."""

    tiles: Tiles
    resident: int


def choose(capacity: int, held: int, used: int) -> DividedCut:
    """Return the cut for ranks with so many tokens each. A tile holds an expert's pairs, if counts are about even."""
    each = capacity * used / held  # uniform routing brings a rank as many pairs as it has itself
    tokens = max(16, min(128, power_of_two(int(1.5 * each))))
    if tokens == 128:
        return DividedCut(Tiles(128, tokens, 64, 8, 3), 1)
    if tokens == 64:
        return DividedCut(Tiles(64, tokens, 64, 4, 4), 2)
    return DividedCut(Tiles(64, tokens, 128, 4, 4), 2)


def fits(
    x_TM: Tensor, weights: tuple[Tensor, Tensor], gate: str, capacity: int, routes: Routes, rooms: ExpertRooms
) -> bool:
    """Return True if one launch can run experts like these: 16-bit matrices with a gate."""
    (up, down), used = weights, routes.expert_TK.shape[1]
    held, limits = len(up), rooms.limits
    if (x_TM.shape[1], used, held) != limits[1:] or capacity > limits.most or gate in UNGATED:
        return False
    halves = x_TM.dtype in (torch.bfloat16, torch.float16)
    alike = x_TM.dtype == up.dtype == down.dtype and up.is_contiguous() and down.is_contiguous()
    tiles = row_tiles(rooms.size * capacity * used, held, choose(capacity, held, used).tiles.tokens)
    return halves and alike and x_TM.shape[1] % 8 == 0 and down.shape[2] % 8 == 0 and tiles <= COUNTERS


def experts(
    x_TM: Tensor,
    weights: tuple[Tensor, Tensor],
    routes: Routes,
    gate: str,
    add_TM: Tensor | None,
    capacity: int,
    rooms: ExpertRooms,
    cut: DividedCut | None = None,
) -> Tensor:
    """Return, for every token of this rank, the sum over its experts on all ranks, plus `add_TM`: [T, M]. All ranks
    call this at the same time.

    weights: gates and ups [H, G, M], and downs [H, M, F], of this rank's experts.
    routes: those of this rank's tokens to the experts of all ranks, in order.
    capacity: the most tokens of a rank in this step; the same on all ranks.
    """
    up_HGM, down_HMF = weights
    x_TM, (held, _, width), used, room = x_TM.contiguous(), up_HGM.shape, routes.expert_TK.shape[1], rooms.room
    device, dtype, inner = x_TM.device, x_TM.dtype, down_HMF.shape[2]
    plan, resident = cut or choose(capacity, held, used)
    memory, pairs = meeting(device), rooms.size * capacity * used
    out_TM, h_PF, y_PM = (_empty(x_TM, *shape) for shape in ((len(x_TM), width), (pairs, inner), (pairs, width)))
    # Triton's interpreter cannot multiply bfloat16: it would multiply the raw bits
    operands = tl.bfloat16 if dtype == torch.bfloat16 and not INTERPRETED else tl.float16
    experts_kernel[(min(PROGRAMS, resident * num_multiprocessors(device)),)](
        x_TM, up_HGM, down_HMF, x_TM if add_TM is None else add_TM.contiguous(), out_TM, h_PF, y_PM,
        routes.expert_TK, routes.weight_TK.view(torch.int32), routes.place_TK, routes.token_P, routes.start_E1,
        rooms.base_R, rooms.epoch, memory.tiles, memory.ticket, len(x_TM), capacity, rooms.limits.most, *room[:-1],
        M=width, F=inner, K=used, KP=triton.next_power_of_2(used), HELD=held,
        EXPERTS=max(16, triton.next_power_of_2(held)), STARTS=triton.next_power_of_2(held + 1), ROWS=plan.rows,
        TOKENS=plan.tokens, BLOCK=plan.block, STAGES=plan.stages, SEND=1 if capacity <= FEW else 4,
        WIDE=min(WIDE, triton.next_power_of_2(width)), DOT=tl.float32 if INTERPRETED else operands, GATE=gate,
        ADD=add_TM is not None, RANK=rooms.rank, SIZE=rooms.size, PROGRAMS=PROGRAMS, COUNTERS=COUNTERS,
        ASM=not INTERPRETED, num_warps=plan.warps, launch_cooperative_grid=not INTERPRETED,
    )  # fmt: skip
    return out_TM


def _empty(x: Tensor, rows: int, columns: int) -> Tensor:
    return x.new_empty(rows, columns)


def can_run(device: torch.device) -> bool:
    """Return True on Hopper, for which the cuts were timed."""
    return compute_capability(device) == (9, 0)


def _aot(capacity: int) -> AotKernel:
    pointers = dict.fromkeys(("x_ptr", "up_ptr", "down_ptr", "add_ptr", "out_ptr", "h_ptr", "y_ptr"), "*bf16")
    pointers |= dict.fromkeys(("expert_ptr", "weight_ptr", "place_ptr", "token_ptr", "start_ptr"), "*i32")
    pointers |= {"base_ptr": "*i64", "epoch_ptr": "*i32", "tile_ptr": "*i32", "ticket_ptr": "*i32"}
    numbers = dict.fromkeys(("tokens", "capacity", "most"), "i32")
    places = (f"{name}_at" for name in ("results", "heads", "lists", "starts", "told", "arrived", "returned"))
    numbers |= dict.fromkeys(places, "i64:16")
    cut = choose(capacity, 64, 8).tiles
    constants = {
        "M": 2048, "F": 768, "K": 8, "KP": 8, "HELD": 64, "EXPERTS": 64, "STARTS": 128, "ROWS": cut.rows,
        "TOKENS": cut.tokens, "BLOCK": cut.block, "STAGES": cut.stages, "SEND": 1 if capacity <= FEW else 4,
        "WIDE": WIDE, "DOT": tl.bfloat16, "GATE": "silu", "ADD": False, "RANK": 1, "SIZE": 2, "PROGRAMS": PROGRAMS,
        "COUNTERS": COUNTERS, "ASM": True,
    }  # fmt: skip
    return AotKernel(
        experts_kernel, {**pointers, **numbers}, constants, num_warps=cut.warps, hot=True, tensor_cores="HGMMA",
        waits="ranks", archs=("sm_90",),
    )  # fmt: skip


AOT = (_aot(8), _aot(2048))
