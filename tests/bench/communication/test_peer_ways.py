"""Ways over peer memory: ranks that are processes or threads, and share memory as GPUs do over a link."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.parallel.exchange import Exchange
from ridgeline_bench.communication import symmetric_ways
from ridgeline_bench.communication.cases import numbers
from ridgeline_bench.communication.rank import INSIDE, _prepared
from ridgeline_bench.communication.room import Room
from ridgeline_bench.communication.ways import WAYS
from tests.kernels.ranks.ranks import run_ranks

CPU = torch.device("cpu")
SIZES = (60, 200, 2000)  # an exchange takes the first as words, and the others as rows
FEW = 4  # programs of a launch of an exchange: more tokens go as rows
NARROW = 16  # numbers of a token, so that a small message has many


# ---- our own, in Triton's interpreter -------------------------------------------------------------------------------


class Shared(Room):
    """A rank whose peer memory lies in files that all of them map."""

    def give(self, ours: Any, exchange: Exchange) -> None:
        self.__dict__.update(ours=ours, given=exchange)  # the dataclass is frozen

    def exchange(self, tokens: int, width: int) -> Exchange:
        assert tokens * width
        given: Exchange = self.__dict__["given"]
        return given


def rank(number: int, size: int, folder: Path, kind: str) -> None:
    """One process: it checks every case, and saves what is wrong with them."""
    from ridgeline.kernels.ranks.all_reduce import direct, peers
    from ridgeline.kernels.ranks.exchange import rows, words
    from ridgeline.parallel.peer_exchange import PeerExchange
    from ridgeline.parallel.peer_memory import PeerSums
    from ridgeline_bench.communication import cases, own_ways

    def mapped(name: str, nbytes: int) -> list[Tensor]:
        files = [str(folder / f"{name}{n}") for n in range(size)]
        return [torch.from_file(file, shared=True, size=nbytes, dtype=torch.uint8) for file in files]

    def bases(maps: list[Tensor]) -> list[int]:
        kept.append(maps)
        return [each.data_ptr() for each in maps]

    kept: list[list[Tensor]] = []
    for module, name, value in (
        (cases, "WIDTH", NARROW), (own_ways, "WIDTH", NARROW), (words, "PROGRAMS", FEW), (rows, "PROGRAMS", FEW)
    ):  # fmt: skip
        setattr(module, name, value)
    inbox, most = peers.inbox_bytes(size), 256
    ours = object.__new__(PeerSums)
    ours.peers = peers.peers(bases(mapped("inbox", inbox)), number, CPU)
    ours.memory = direct.memory(bases(mapped("rows", direct.memory_bytes(size))), number, CPU)
    exchange = object.__new__(PeerExchange)
    exchange.rank, exchange.size, exchange._most = number, size, most
    exchange._there, exchange._back = (peers.peers(bases(mapped(n, inbox)), number, CPU) for n in ("there", "back"))
    place = rows.Room.of(size, most, NARROW, 1, 2)
    tokens = mapped("tokens", place.size)
    base_R = torch.tensor(bases(tokens), dtype=torch.int64)
    epoch_P = torch.zeros(peers.PROGRAMS, dtype=torch.int32)
    exchange._rooms = rows.Rooms(tokens[number], base_R, epoch_P, number, size, place)
    room = Shared(number, size, CPU, torch.bfloat16)
    room.give(ours, exchange)
    found = {}
    for way, op in OURS:
        for nbytes in SIZES:
            found[way, op, nbytes] = _prepared(room, op, way, numbers(op, nbytes, size, room.dtype))[1]
    torch.save(found, folder / f"found{number}")


OURS = [(way, op) for way in ("ours", "ours-two-shot") for op in WAYS[way] if op != "all_reduce_norm"]


def test_our_ways_give_what_is_expected(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from ridgeline.kernels.ranks.all_reduce import direct, peers
    from ridgeline.kernels.ranks.exchange import rows

    size, inbox = 2, peers.inbox_bytes(2)
    lengths = {"inbox": inbox, "there": inbox, "back": inbox, "rows": direct.memory_bytes(size)}
    lengths["tokens"] = rows.Room.of(size, 256, NARROW, 1, 2).size
    for name, nbytes in lengths.items():
        for number in range(size):
            with (tmp_path / f"{name}{number}").open("wb") as file:
                file.truncate(nbytes)
    run_ranks("tests.bench.communication.test_peer_ways", size, tmp_path, "bfloat16")
    cases = {(way, op, nbytes): None for way, op in OURS for nbytes in SIZES}
    assert [torch.load(tmp_path / f"found{number}") for number in range(size)] == [cases] * size
    assert ("ours", "exchange") in OURS
    assert ("ours", "all_gather") in OURS


# ---- torch's symmetric memory, where ranks are threads --------------------------------------------------------------


class Board:
    """The memory of all ranks, and what NVSHMEM's ops do with it."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, Barrier(size)
        self.slots: list[list[Tensor]] = [[] for _ in range(size)]

    def nvshmem_put_with_signal(self, x_N: Tensor, pad_1: Tensor, value: int, to: int) -> None:
        self._there(x_N, to).copy_(x_N)
        self._there(pad_1, to).fill_(value)

    def nvshmem_wait_for_signal(self, pad_1: Tensor, value: int, source: int) -> None:
        assert 0 <= source < self.size
        end = monotonic() + 60
        while int(pad_1) != value:
            assert monotonic() < end
            sleep(0)

    def nvshmem_get(self, x_N: Tensor, source: int) -> None:
        x_N.copy_(self._there(x_N, source))

    def _there(self, x_N: Tensor, rank: int) -> Tensor:
        """Return the tensor at the same address on another rank: the same place in its memory of the same number."""
        for slots in self.slots:
            for number, each in enumerate(slots):
                first = (x_N.data_ptr() - each.data_ptr()) // each.itemsize
                if 0 <= first < len(each):
                    return self.slots[rank][number][first : first + len(x_N)]
        raise AssertionError


class Handle:
    def __init__(self, board: Board, slot: int) -> None:
        self._board, self._slot = board, slot

    def barrier(self) -> None:
        self._board.barrier.wait(60)

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._board.slots[rank][self._slot].view(dtype).view(shape)


class Thread(Room):
    def on(self, board: Board) -> Thread:
        self.__dict__["board"] = board
        return self

    def shared(self, count: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Any]:
        board: Board = self.__dict__["board"]
        board.slots[self.rank].append(self.zeros(count).to(dtype or self.dtype))
        board.barrier.wait(60)
        return board.slots[self.rank][-1], Handle(board, len(board.slots[self.rank]) - 1)


@pytest.mark.parametrize("way", ["symmetric-put", "symmetric-get", "nvshmem", "nvshmem-get"])
def test_messages_through_symmetric_memory_reach_the_next_rank(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 4
    board = Board(size)

    def found(number: int) -> tuple[str, str] | None:
        room = Thread(number, size, CPU, torch.float32).on(board)
        return _prepared(room, "send", way, 4096)[1]

    monkeypatch.setattr(symmetric_ways, "_nvshmem", board.__getattribute__)
    with ThreadPoolExecutor(size) as threads:
        assert list(threads.map(found, range(size))) == [None] * size


def test_signals_in_turn_keep_ranks_together_also_where_a_graph_repeats_its_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size, board = 4, Board(4)
    monkeypatch.setattr(symmetric_ways, "_nvshmem", board.__getattribute__)

    def found(number: int) -> bool:
        room, right = Thread(number, size, CPU, torch.float32).on(board), True
        meet, (x_N, y_N) = symmetric_ways.Signals(room), symmetric_ways._in_turn(room, 8)
        for again in range(3 * INSIDE):
            if again % INSIDE == 0:
                meet._calls = 0  # the same calls again, as a graph's
            x_N.fill_(again * size + number)
            meet(x_N)
            right &= again <= int(y_N.min()) // size and int(y_N.max()) // size <= again + size
        return right

    assert INSIDE % (2 * symmetric_ways.Signals.PADS) == 0
    with ThreadPoolExecutor(size) as threads:
        assert all(threads.map(found, range(size)))


def test_ways_that_need_gpus_say_so() -> None:
    room = Room(0, 2, CPU, torch.float32)
    for way, ops in WAYS.items():
        if way in ("gloo", "nccl", "scatter-gather", "two-level"):
            continue
        for op in ops:
            _, why = _prepared(room, op, way, 4096)
            assert why is not None
            assert why[0] == "not available", (way, op, why)
