"""The words for weights that another process sends into an engine that runs.

A trainer is rank 0 of a group whose other ranks are the workers. It announces names, types and shapes, and broadcasts
the tensors' bytes in that order: one by one, or packed. A pack ends with the tensor by which it exceeds the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple, Protocol, runtime_checkable

from ridgeline.core.errors import DeviceLost, InvalidConfig

BUFFER_BYTES = 1 << 30  # of a pack, where nothing is said: both ends must agree, and vLLM's trainers say nothing
MOST_BUFFER_BYTES = 16 << 30
MOST_TENSORS = 1 << 17
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


class TransferFailed(InvalidConfig):
    """Weights could not be received. The old ones are whole, and the group is closed."""


class WeightsTorn(DeviceLost):
    """Weights are partly old and partly new, so that the engine must end."""


@dataclass(frozen=True)
class Meeting:
    """The place where ranks meet the trainer.

    address, port: of the trainer's store. rank: the number of the first worker in the group. size: the ranks of the
    group. limit: seconds for each wait.
    """

    address: str
    port: int
    rank: int
    size: int
    limit: float


class SentTensor(NamedTuple):
    """A tensor that is announced."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEMSIZES[self.dtype]


@dataclass(frozen=True)
class Announced:
    """Tensors in the order in which they come. buffer_bytes: of a pack; 0: each tensor comes by itself."""

    tensors: tuple[SentTensor, ...]
    buffer_bytes: int = 0

    @classmethod
    def of(
        cls, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], buffer_bytes: int
    ) -> Announced:
        """Return the tensors that three lists of equal length announce. Raise InvalidConfig, in one sentence, for
        those that no model could take."""
        if not len(names) == len(dtypes) == len(shapes):
            raise InvalidConfig(
                f"there are {len(names)} names, {len(dtypes)} dtype_names and {len(shapes)} shapes; send equally many."
            )
        if not 0 < len(names) <= MOST_TENSORS:
            raise InvalidConfig(f"{len(names)} tensors are announced; send 1 to {MOST_TENSORS} with an update.")
        if not 0 <= buffer_bytes <= MOST_BUFFER_BYTES:
            raise InvalidConfig(
                f"packed_buffer_size_bytes is {buffer_bytes}; send a number from 1 to {MOST_BUFFER_BYTES}."
            )
        for before, name in pairwise(sorted(names)):
            if before == name:
                raise InvalidConfig(f"{name[:200]} is announced twice; send each tensor once with an update.")
        for name, dtype in zip(names, dtypes, strict=True):
            if dtype not in ITEMSIZES:
                raise InvalidConfig(f"{name[:200]} is {dtype[:40]!r}, and weights are {', '.join(ITEMSIZES)}.")
        return cls(tuple(map(SentTensor, names, dtypes, map(tuple, shapes))), buffer_bytes)

    def packs(self) -> Iterator[list[SentTensor]]:
        """Yield the tensors of each broadcast."""
        pack: list[SentTensor] = []
        size = 0
        for each in self.tensors:
            pack.append(each)
            size += each.num_bytes
            if not self.buffer_bytes or size > self.buffer_bytes:
                yield pack
                pack, size = [], 0
        if pack:
            yield pack


@runtime_checkable
class TakesWeights(Protocol):
    """A worker whose weights another process replaces. No plan may be under way."""

    def meet_trainer(self, meeting: Meeting) -> None:
        """Join the trainer's group in place of an earlier one. Raise InvalidConfig for a model whose weights cannot be
        replaced, and TransferFailed."""

    def take_weights(self, announced: Announced) -> None:
        """Receive tensors into the weights. Raise TransferFailed if that fails before anything is written, and
        InvalidConfig, before anything is received, for tensors that are not this model's; the group is closed then.
        Raise WeightsTorn if it fails later."""
