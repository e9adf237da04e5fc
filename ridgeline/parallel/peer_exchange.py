"""The exchange of tokens between the GPUs of one machine, through memory that each of them can write to (symmetric
memory of torch; no multicast is used)."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from ridgeline.kernels.gemm.experts import divided
from ridgeline.kernels.gemm.route.op import Routes
from ridgeline.kernels.ranks.all_reduce.peers import PROGRAMS, inbox_bytes, peers
from ridgeline.kernels.ranks.exchange import rows, words
from ridgeline.parallel.exchange import Arrived, Combined, Dispatched, Stacks, Swaps, check_tokens

ONE_LAUNCH_TOKENS = 0  # tokens of a rank up to which dispatch, products and combine are one launch
HIDDEN_TOKENS = 1 << 30  # tokens of a rank from which a shared expert runs between the parts of a combine: none gained


class PeerExchange:
    """Few tokens go as words that carry the number of their message, many as rows behind which a flag is set. Every
    rank makes one at the same time. Raise RuntimeError where GPUs cannot write to each other.

    most: the most tokens that a rank can have in a step. used: experts of a token, in the layer that has most. held:
    experts of this rank in each layer, if one launch may run all of it.
    """

    def __init__(
        self, ranks: Swaps, device: torch.device, *, most: int, width: int, used: int, itemsize: int, held: int = 0
    ) -> None:
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
        self._whole = self._in_one_launch(device, width, used, held) if held and divided.can_run(device) else None
        dist.barrier(device_ids=[device.index])

    def _in_one_launch(self, device: torch.device, width: int, used: int, held: int) -> divided.ExpertRooms | None:
        """Return the memory of experts in one launch, for as many tokens as that is faster for."""
        most = min(self._most, ONE_LAUNCH_TOKENS)
        if not most or self.size != 2:  # more ranks than two were never timed
            return None
        room = divided.ExpertRoom.of(self.size, most, width, used, held, 2)
        self._whole_memory = symmetric.empty(room.size, dtype=torch.uint8, device=device)
        self._whole_memory.zero_()
        torch.cuda.synchronize(device)
        self._whole_handle = symmetric.rendezvous(self._whole_memory, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        base_R = torch.tensor(list(self._whole_handle.buffer_ptrs), dtype=torch.int64, device=device)
        epoch = torch.zeros(1, dtype=torch.int32, device=device)
        return divided.ExpertRooms(
            base_R, epoch, self.rank, self.size, divided.RoomLimits(most, width, used, held), room
        )

    def smallest(self, value: int) -> int:
        return self._ranks.smallest(value)

    def in_one_launch(self, x_TM: Tensor, routes: Routes, weights: Stacks, gate: str) -> Combined | None:
        whole, capacity = self._whole, self.capacity
        if whole is None or not divided.fits(x_TM, weights, gate, capacity, routes, whole):
            return None
        check_tokens(len(x_TM), capacity)
        return lambda add_TM: divided.experts(x_TM, weights, routes, gate, add_TM, capacity, whole)

    def hides(self) -> bool:
        return self.capacity >= HIDDEN_TOKENS

    def dispatch(self, x_TM: Tensor, expert_TK: Tensor, weight_TK: Tensor, held: int) -> Arrived:
        check_tokens(len(x_TM), min(self.capacity, self._most))
        return self._dispatched(x_TM, expert_TK.int(), weight_TK, held, receives=True)

    def begin_dispatch(self, x_TM: Tensor, expert_TK: Tensor, weight_TK: Tensor, held: int) -> Dispatched:
        check_tokens(len(x_TM), min(self.capacity, self._most))
        arrived = self._dispatched(x_TM, expert_TK.int(), weight_TK, held, receives=False)

        def came() -> Arrived:
            if words.fits(x_TM, expert_TK.shape[1], self.capacity):
                words.receive(arrived[:3], held, self.capacity, self._there)
            else:
                rows.receive(self.capacity, self._rooms)
            return arrived

        return came

    def _dispatched(self, x_TM: Tensor, expert_TK: Tensor, weight_TK: Tensor, held: int, *, receives: bool) -> Arrived:
        if words.fits(x_TM, expert_TK.shape[1], self.capacity):
            came = words.dispatch(x_TM, expert_TK, weight_TK, held, self.capacity, self._there, receives=receives)
        else:
            came = rows.dispatch(x_TM, expert_TK, weight_TK, held, self.capacity, self._rooms, receives=receives)
        return Arrived(*came, expert_TK, held)

    def combine(self, y_NM: Tensor, arrived: Arrived, add_TM: Tensor | None = None) -> Tensor:
        expert_NK, sent_TK, held = arrived.expert_NK, arrived.sent_TK, arrived.held
        if words.fits(y_NM, sent_TK.shape[1], self.capacity):
            return words.combine(y_NM, expert_NK, sent_TK, held, self.capacity, add_TM, self._back)
        return rows.combine(y_NM, expert_NK, sent_TK, held, self.capacity, add_TM, self._rooms)

    def begin_combine(self, y_NM: Tensor, arrived: Arrived) -> Combined:
        y_NM, expert_NK, sent_TK, held = y_NM.contiguous(), arrived.expert_NK, arrived.sent_TK, arrived.held
        few = words.fits(y_NM, sent_TK.shape[1], self.capacity)
        if few:
            words.send_back(y_NM, expert_NK, held, self.capacity, self._back)
        else:
            rows.send_back(y_NM, expert_NK, held, self.capacity, self._rooms)

        def added(add_TM: Tensor | None) -> Tensor:
            if few:
                return words.add_up(y_NM, expert_NK, sent_TK, held, self.capacity, add_TM, self._back)
            return rows.add_up(y_NM, expert_NK, sent_TK, held, self.capacity, add_TM, self._rooms)

        return added
