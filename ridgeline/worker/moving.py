"""Experts that change places between two steps.

The matrices of an order travel tensor by tensor, by one collective for each, so that little memory is taken. They are
written into the slots, and tables are changed, where these lie: what was captured in a graph reads the new ones. All of
this runs after the steps before and ahead of the steps to come, so no step sees only a part of it.

Legend:
    N  rows that travel
    B  bytes of a row
    R  ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.reserve import Reserved, StepSizes
from ridgeline.core.settings.rebalancing import MOST
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.experts import Experts
from ridgeline.quantization.experts import tensors_of

Takes = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class MovedExperts:
    """The experts that a rank sends and gets between two steps, at most, one matrix of each at a time."""

    model: ModelSpec

    def reserve(self, sizes: StepSizes) -> Reserved:
        mixtures = [layer.feed_forward for layer in self.model.layers if isinstance(layer.feed_forward, ExpertsSpec)]
        numbers = (sum(each.fused) * (each.latent or self.model.hidden_size) for each in mixtures)
        return Reserved(2 * MOST * max(numbers, default=0) * sizes.itemsize)


class Mover:
    """The mixtures of a network whose experts can change places. copied: bytes that came from other ranks."""

    def __init__(self, decoder: Decoder) -> None:
        self._mixtures = [layer.feed_forward for layer in decoder.layers if isinstance(layer.feed_forward, Experts)]
        self._ranks = decoder.mesh.movers
        self.copied = 0

    def check(self) -> None:
        """Raise InvalidConfig if experts are held in a form that does not travel."""
        for mixture in self._mixtures:
            if any(tensor.is_mkldnn for tensor in _tensors(mixture, 0)):
                raise InvalidConfig(
                    "enable_eplb: experts lie in oneDNN's own layout here, in which they cannot travel; leave it "
                    "out, or take another quantization."
                )

    @torch.inference_mode()
    def move(self, mixture: int, takes: Takes) -> None:
        """Let slots take the experts of other slots, all at once. Every rank calls it with the same order.

        takes: slots, and for each the slot whose expert it takes. Slot s of rank r has the number r · slots + s.
        """
        experts, ranks = self._mixtures[mixture], self._ranks
        assert experts.copies is not None
        assert ranks is not None
        held = experts.spec.stacked
        sent = [
            [source % held for slot, source in takes if source // held == ranks.rank and slot // held == rank]
            for rank in range(ranks.size)
        ]
        came = [
            [slot % held for slot, source in takes if slot // held == ranks.rank and source // held == rank]
            for rank in range(ranks.size)
        ]
        for number, like in enumerate(_tensors(experts, 0)):
            rows = [_bytes(_tensors(experts, slot)[number]) for slots in sent for slot in slots]
            sent_NB = torch.stack(rows) if rows else _bytes(like).new_empty(0, like.nbytes)
            came_NB = ranks.swap_rows(sent_NB, list(map(len, sent)), list(map(len, came)))
            for slot, row_B in zip((slot for slots in came for slot in slots), came_NB, strict=True):
                into = _tensors(experts, slot)[number]
                into.copy_(row_B.view(into.dtype).view(into.shape))
            foreign = sum(len(slots) for rank, slots in enumerate(came) if rank != ranks.rank)
            self.copied += foreign * like.nbytes
        experts.copies.take(takes)


def _tensors(experts: Experts, slot: int) -> list[Tensor]:
    """Return all that the expert in a slot consists of."""
    found = []
    for stack in (experts.gate_up, experts.down):
        found += tensors_of(stack.matrices, slot)
        if stack.bias is not None:
            found.append(stack.bias[slot])
    return found


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)
