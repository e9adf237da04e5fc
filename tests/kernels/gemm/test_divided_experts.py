"""Experts that ranks divide, in one launch: every program of every rank is a process, and all run at once, in whatever
order the machine lets them."""

from __future__ import annotations

import random
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ridgeline.kernels.base import counters
from ridgeline.kernels.base.counters import MeetingMemory
from ridgeline.kernels.gemm.experts import divided
from ridgeline.kernels.gemm.experts.choose import Tiles
from ridgeline.kernels.gemm.experts.divided import DividedCut, ExpertRoom, ExpertRooms, RoomLimits, experts
from ridgeline.kernels.gemm.experts.op import grouped_down, grouped_gate_up
from ridgeline.kernels.gemm.route.op import Routes, in_order
from tests.kernels.ranks.ranks import run_ranks

RANKS, PROGRAMS = 2, 3
HELD, WIDTH, INNER, USED, MOST = 3, 40, 24, 3, 24
CUT = DividedCut(Tiles(16, 16, 16, 4, 1), 1)
# The capacity and the tokens of each rank, in steps that follow each other: some have none, one more than a tile
STEPS = [(4, (4, 3)), (2, (0, 2)), (24, (24, 17)), (4, (4, 0)), (24, (2, 24)), (1, (0, 0)), (1, (1, 1))]
DELAY = 0.004  # seconds, at most, of a flag or a counter of the rank that is slow in a step; they take turns


def matrices(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    up = torch.randn(HELD, 2 * INNER, WIDTH, generator=generator) * WIDTH**-0.5
    return up, torch.randn(HELD, WIDTH, INNER, generator=generator) * INNER**-0.5


def tokens(rank: int, step: int, number: int) -> tuple[Tensor, Routes, Tensor | None]:
    """Return a rank's (x, routes, what is added). Some tokens go nowhere; in one step all go to the second rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x_TM = torch.randn(number, WIDTH, generator=generator)
    first = HELD if step == 3 else 0
    expert_TK = first + torch.rand(number, RANKS * HELD - first, generator=generator).topk(USED, dim=1).indices
    if number > 2:
        expert_TK[1] = RANKS * HELD
    weight_TK = torch.rand(number, USED, generator=generator)
    add_TM = torch.randn(number, WIDTH, generator=generator) if step % 2 else None
    return x_TM, in_order(expert_TK.int(), weight_TK, RANKS * HELD), add_TM


def wanted(rank: int, step: int, number: int) -> Tensor:
    """Return what one device computes that has all experts."""
    x_TM, routes, add_TM = tokens(rank, step, number)
    up, down = (torch.cat(each) for each in zip(*map(matrices, range(RANKS)), strict=True))
    return grouped_down(grouped_gate_up(x_TM, up, None, routes, "silu"), down, None, routes, add_TM)


def rank(number: int, processes: int, folder: Path, what: str) -> None:
    """One program of one rank: it runs the steps' launches, with memory that it shares with the others."""
    own, program = divmod(number, PROGRAMS)
    names = count()

    def shared(rank: int, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        size = torch.Size(shape).numel()
        return torch.from_file(str(folder / f"{rank} {name}"), shared=True, size=max(1, size), dtype=dtype)[:size].view(
            shape
        )

    room = ExpertRoom.of(RANKS, MOST, WIDTH, USED, HELD, 4)
    boxes = [shared(each, "room", room.size, dtype=torch.uint8) for each in range(RANKS)]
    bases = torch.tensor([box.data_ptr() for box in boxes])
    rooms = ExpertRooms(
        bases, shared(own, "epoch", 1, dtype=torch.int32), own, RANKS, RoomLimits(MOST, WIDTH, USED, HELD), room
    )
    sizes = counters.COUNTERS, counters.TICKETS
    tiles, ticket = shared(own, "counters", sum(sizes), dtype=torch.int32).split(sizes)
    at_step = shared(own, "steps", PROGRAMS, dtype=torch.int32)
    divided.meeting = lambda device: MeetingMemory(tiles, ticket, tiles, tiles)  # type: ignore[attr-defined]
    divided._empty = lambda x, rows, columns: shared(own, f"scratch {next(names)}", rows, columns)
    divided.PROGRAMS, divided.num_multiprocessors = 4, lambda device: 1  # type: ignore[misc, attr-defined]
    slow = _be(program)
    up, down = matrices(own)
    got = []
    for step, (capacity, counts) in enumerate(STEPS):
        slow[:] = [DELAY if step % 2 != own else 0.0]
        x_TM, routes, add_TM = tokens(own, step, counts[own])
        got.append(experts(x_TM, (up, down), routes, "silu", add_TM, capacity, rooms, CUT))
        at_step[program] = step + 1
        while (at_step <= step).any():  # a launch begins when the one before has ended
            time.sleep(0.001)
    if program == 0:
        torch.save([*got, tiles, ticket[:1], rooms.epoch], folder / f"got{own}")


def _be(program: int) -> list[float]:
    """Let launches of one program run the given one of PROGRAMS. Return the most seconds that its flags and counters
    are late, to be set."""
    from triton.runtime.interpreter import interpreter_builder as builder

    known: Any = builder
    index, dim, atomic, slow = known.set_grid_idx, known.set_grid_dim, known.create_atomic_rmw, [0.0]
    chance = random.Random(program)

    def late(*arguments: Any) -> Any:
        time.sleep(slow[0] * chance.random())
        return atomic(*arguments)

    known.set_grid_idx = lambda *at: index(program, 0, 0)
    known.set_grid_dim = lambda *dims: dim(PROGRAMS, 1, 1)
    known.create_atomic_rmw = late
    return slow


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what ranks got."""
    folder = tmp_path_factory.mktemp("launched")
    sizes = {"room": ExpertRoom.of(RANKS, MOST, WIDTH, USED, HELD, 4).size, "epoch": 4, "steps": 4 * PROGRAMS}
    sizes |= {"counters": 4 * (counters.COUNTERS + counters.TICKETS)}
    scratch = 4 * RANKS * MOST * USED * max(WIDTH, INNER)
    sizes |= {f"scratch {number}": scratch for number in range(3 * len(STEPS))}
    for each in range(RANKS):
        for name, size in sizes.items():
            with (folder / f"{each} {name}").open("wb") as file:
                file.truncate(size)
    run_ranks("tests.kernels.gemm.test_divided_experts", RANKS * PROGRAMS, folder, "all")
    return folder


@pytest.mark.parametrize("rank", range(RANKS))
def test_every_token_gets_what_one_device_computes(rank: int, launched: Path) -> None:
    *got, tiles, ticket, epoch = torch.load(launched / f"got{rank}")
    for step, (_, counts) in enumerate(STEPS):
        want_TM = wanted(rank, step, counts[rank])
        torch.testing.assert_close(got[step], want_TM, rtol=1e-5, atol=1e-5)
    assert not tiles.any()
    assert not ticket.any()
    assert epoch.item() == len(STEPS)
