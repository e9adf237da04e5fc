"""The pipe of a rank that is a process: torch.distributed carries what stages say to each other."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.parallel.axis import Axis
from ridgeline.parallel.pipe import Wait
from ridgeline.parallel.processes import ProcessAxis


class Line:
    """One direction between two processes, with a group of its own. So what waits for its receiver there holds up no
    other line: NCCL runs the messages of one group in order. Gloo knows no GPU: messages of one pass through the host's
    memory, for which the host waits."""

    def __init__(self, source: int, target: int, group: Any, kept: int) -> None:
        self._source, self._target, self._group, self._kept = source, target, group, kept
        self._through_host = dist.get_backend(group) == "gloo"
        self._on_the_way: deque[tuple[Any, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        x = (x.cpu() if self._through_host else x).contiguous()
        self._on_the_way.append((dist.isend(x, self._target, group=self._group), x))
        if len(self._on_the_way) > self._kept:  # all receivers are this far, or come here without waiting for this rank
            self._on_the_way.popleft()[0].wait()

    def receive(self, into: Tensor) -> Wait:
        """Begin to receive, and return what waits for the end of it."""
        staged = self._through_host and into.is_cuda
        held = torch.empty_like(into, device="cpu", pin_memory=True) if staged else into
        work = dist.irecv(held, self._source, group=self._group)
        assert work is not None
        return (lambda: (work.wait(), into.copy_(held, non_blocking=True))) if staged else work.wait


class ProcessPipe:
    """The pipe of a process.

    peers: the processes that hold the same part of each stage, in the order of stages; this one is `peers[rank]`.
    lines: the group of each line between two of them. axis: all processes, for what they agree on.
    """

    def __init__(self, rank: int, peers: Sequence[int], lines: dict[tuple[int, int], Any], axis: Axis) -> None:
        self.rank, self.size, self._axis = rank, len(peers), axis
        kept = 2 * self.size  # parts of the plans in flight

        def line(source: int, target: int) -> Line:
            return Line(peers[source], peers[target], lines[peers[source], peers[target]], kept)

        last = self.size - 1
        self._before = line(rank - 1, rank) if rank > 0 else None
        self._behind = line(rank, rank + 1) if rank < last else None
        self._back = [line(last, stage) for stage in range(last)] if rank == last else [line(last, rank)]

    def receive(self, into_TM: Tensor) -> None:
        assert self._before is not None
        self._before.receive(into_TM)()

    def send(self, x_TM: Tensor) -> None:
        assert self._behind is not None
        self._behind.send(x_TM)

    def hear(self, into_R: Tensor) -> Wait:
        return self._back[0].receive(into_R)

    def tell(self, token_R: Tensor) -> None:
        for line in self._back:
            line.send(token_R)

    def smallest(self, value: int) -> int:
        return self._axis.smallest(value)


def line_pairs(peers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the lines between processes of consecutive stages, and those from the last one back to all others."""
    forward = list(itertools.pairwise(peers))
    return forward + [(peers[-1], peer) for peer in peers[:-1]]


def connect(axis: ProcessAxis, columns: Sequence[Sequence[int]], limit: float) -> ProcessPipe:
    """Return this process's pipe. Every process calls it once.

    axis: the axis over all processes. columns: those of each pipe, in the order of stages.
    limit: seconds after which a message fails.
    """
    lines: dict[tuple[int, int], Any] = {}
    for pair in itertools.chain.from_iterable(map(line_pairs, columns)):  # in the same order everywhere
        lines[pair] = dist.new_group(list(pair), timeout=timedelta(seconds=limit))
    [peers] = (column for column in columns if axis.rank in column)
    return ProcessPipe(peers.index(axis.rank), peers, lines, axis)
