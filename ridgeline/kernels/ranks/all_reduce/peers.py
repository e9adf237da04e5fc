"""Memory through which the GPUs of one machine write to each other."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PROGRAMS = 128  # programs of a launch at most: all run at once, since each waits for its counterpart on other ranks
WORDS = 4096  # of 32 bits, of a program at most
PHASES = 2  # a rank writes the next sum while another may still read the last one


class Peers(NamedTuple):
    """The inboxes of all ranks, as one of them sees them.

    An inbox is int64 [phase, writing rank, program, word]: 32 bits of data, and above them the number of the message.

    base_R: int64, where this rank sees the inbox of each rank.
    epoch_P: int32, how many messages each program has sent so far.
    """

    base_R: Tensor
    epoch_P: Tensor
    rank: int
    size: int


def inbox_bytes(size: int) -> int:
    """Return the bytes of an inbox among so many ranks. It begins as zeros."""
    return PHASES * size * PROGRAMS * WORDS * 8


def peers(bases: list[int], rank: int, device: torch.device) -> Peers:
    """Return the peers of a rank that sees the inboxes at these addresses."""
    base_R = torch.tensor(bases, dtype=torch.int64, device=device)
    return Peers(base_R, torch.zeros(PROGRAMS, dtype=torch.int32, device=device), rank, len(bases))
