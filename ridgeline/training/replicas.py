"""Fine-tuning by several processes, each with a device and all weights: a step's packs are shared out between them, and
their gradients are added up. So every process makes the same step, and one of them writes.

Processes are those of torchrun: `torchrun --nproc-per-node 2 -m ridgeline train sft …`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.training.optimizer import of_bytes

PLACE = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets these beside WORLD_SIZE
BUCKET = 1 << 27  # bytes of gradients that are sent at once, or those of one tensor


@dataclass(frozen=True)
class TrainingReplicas:
    """The place of this process among those that train together."""

    rank: int = 0
    size: int = 1

    def own(self, packs: list[list[int]]) -> list[list[int]]:
        """Return the packs of a step that this process runs."""
        return packs[self.rank :: self.size]

    @torch.no_grad()
    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Add up tensors of one dtype over all processes, in place. All have the same bits afterwards."""
        if self.size == 1:
            return
        for some in of_bytes(tensors, BUCKET):
            if len(some) == 1:
                dist.all_reduce(some[0])
                continue
            joined = torch.cat([each.flatten() for each in some])
            dist.all_reduce(joined)
            for each, summed in zip(some, joined.split([each.numel() for each in some]), strict=True):
                each.copy_(summed.view_as(each))


def asked_for() -> int:
    """Return the number of processes that torchrun has started; 1 without it. Raise InvalidConfig if that is no
    number."""
    found = os.environ.get("WORLD_SIZE", "1")
    if not (found.isascii() and found.isdigit() and int(found)):
        raise InvalidConfig(f"WORLD_SIZE, which torchrun sets, must be a number of processes, got {found!r}.")
    return int(found)


def alone(what: str) -> None:
    """Raise InvalidConfig if torchrun has started several processes. what: what one process does: several would all do
    the same, and write to the same files."""
    if (count := asked_for()) > 1:
        raise InvalidConfig(f"{what} by one process; start it without torchrun, not {count}.")


@contextmanager
def joined(device: torch.device) -> Iterator[tuple[TrainingReplicas, torch.device]]:
    """Meet the other processes that torchrun has started, if there are some. Yield the place among them and the device
    of this one: of GPUs that with its number on the host. A group of processes that is there already is taken."""
    size = dist.get_world_size() if dist.is_initialized() else asked_for()
    if size == 1:
        yield TrainingReplicas(), device
        return
    met = dist.is_initialized()
    if device.type == "cuda" and ":" in str(device):
        raise InvalidConfig(f"each of {size} processes takes a GPU of its own; give --device cuda, not {device}.")
    if not met and (lacking := [name for name in PLACE if name not in os.environ]):
        raise InvalidConfig(
            f"WORLD_SIZE is {size}, but there is no {lacking[0]}; start by torchrun, or unset WORLD_SIZE."
        )
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if device.index >= torch.cuda.device_count():
            raise InvalidConfig(f"{device} does not exist; start at most {torch.cuda.device_count()} processes here.")
        torch.cuda.set_device(device)
    elif os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this machine, whatever its name resolves to
    on_gpu = device.type == "cuda"
    if not met:
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    try:
        yield TrainingReplicas(dist.get_rank(), size), device
    finally:
        if not met:
            dist.destroy_process_group()
