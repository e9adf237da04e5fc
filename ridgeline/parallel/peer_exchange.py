"""The exchange of tokens between the GPUs of one machine, through memory that each of them can write to (symmetric
memory of torch; no multicast is used)."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from ridgeline.kernels.ranks.all_reduce.peers import PROGRAMS, inbox_bytes, peers
from ridgeline.kernels.ranks.exchange import rows, words
from ridgeline.parallel.exchange import Arrived, Swaps, check_tokens


class PeerExchange:
    """Few tokens go as words that carry the number of their message, many as rows behind which a flag is set. Every
    rank makes one at the same time. Raise RuntimeError where GPUs cannot write to each other.

    most: the most tokens that a rank can have in a step. used: experts of a token, in the layer that has most.
    """

    def __init__(self, ranks: Swaps, device: torch.device, *, most: int, width: int, used: int, itemsize: int) -> None:
        self.rank, self.size, self.capacity, self._ranks = ranks.rank, ranks.size, 0, ranks
        self._most, half, room = most, inbox_bytes(ranks.size), rows.Room.of(ranks.size, most, width, used, itemsize)
        self._memory = symmetric.empty(2 * half + room.size, dtype=torch.uint8, device=device)
        self._memory.zero_()
        torch.cuda.synchronize(device)  # before any rank writes
        self._handle = symmetric.rendezvous(self._memory, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        bases = list(self._handle.buffer_ptrs)
        self._there, self._back = (peers([base + at for base in bases], self.rank, device) for at in (0, half))
        base_R = torch.tensor([base + 2 * half for base in bases], dtype=torch.int64, device=device)
        epoch_P = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        self._rooms = rows.Rooms(self._memory[2 * half :], base_R, epoch_P, self.rank, self.size, room)
        dist.barrier(device_ids=[device.index])

    def smallest(self, value: int) -> int:
        return self._ranks.smallest(value)

    def dispatch(self, x_TM: Tensor, expert_TK: Tensor, weight_TK: Tensor, held: int) -> Arrived:
        check_tokens(len(x_TM), min(self.capacity, self._most))
        few = words.fits(x_TM, expert_TK.shape[1], self.capacity)
        expert_TK = expert_TK.int()
        if few:
            came = words.dispatch(x_TM, expert_TK, weight_TK, held, self.capacity, self._there)
        else:
            came = rows.dispatch(x_TM, expert_TK, weight_TK, held, self.capacity, self._rooms)
        return Arrived(*came, expert_TK, held)

    def combine(self, y_NM: Tensor, arrived: Arrived, add_TM: Tensor | None = None) -> Tensor:
        sent_TK, held = arrived.sent_TK, arrived.held
        if words.fits(y_NM, sent_TK.shape[1], self.capacity):
            return words.combine(y_NM, arrived.expert_NK, sent_TK, held, self.capacity, add_TM, self._back)
        return rows.combine(y_NM, arrived.expert_NK, sent_TK, held, self.capacity, add_TM, self._rooms)
