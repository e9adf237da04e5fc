"""Weights that a trainer sends into the parameters of a network that runs.

While a pack is checked and copied, the next one is on its way into a second buffer.

Legend:
    B  bytes
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.transfer import Announced, Meeting, SentTensor, TransferFailed, WeightsTorn
from ridgeline.core.specs.model import WeightMap
from ridgeline.layers.decoder import Decoder
from ridgeline.parallel.broadcast import TransferPeers, join
from ridgeline.weights.live import LiveWeights


class ReceivedWeights:
    """The weights of a rank's network, and the group by which a trainer sends them."""

    def __init__(self, decoder: Decoder, weights: WeightMap, device: torch.device) -> None:
        self._decoder, self._weights, self._device = decoder, weights, device
        self._live: LiveWeights | None = None
        self._peers: TransferPeers | None = None

    @property
    def live(self) -> LiveWeights:
        """The weights. Raise InvalidConfig if they cannot be replaced."""
        if self._live is None:
            self._live = LiveWeights(self._decoder, self._weights)
        return self._live

    def meet(self, meeting: Meeting) -> None:
        """See `core.plan.transfer.TakesWeights`."""
        self._leave()
        _ = self.live
        mesh = self._decoder.mesh
        own = (mesh.pp.rank * mesh.cp.size + mesh.cp.rank) * mesh.of_experts.size + mesh.of_experts.rank
        self._peers = join(meeting, meeting.rank + own, self._device)

    def take(self, announced: Announced) -> None:
        """See `core.plan.transfer.TakesWeights`."""
        written = False
        try:
            self.live.check_shapes({each.name: each.shape for each in announced.tensors})
            for tensors in self._arrivals(announced):
                if not _finite(tensors.values()):
                    name = next(name for name, tensor in tensors.items() if not _finite([tensor]))
                    raise InvalidConfig(f"{name} holds numbers that are not finite; the old weights stay.")
                written = True
                self.live.replace(tensors)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except Exception as error:
            self._leave()  # what the trainer still sends must not be taken for the next tensors
            words = str(error).strip().splitlines() or [type(error).__name__]
            if written:
                raise WeightsTorn(f"weights were replaced in part ({words[0]}); load the model again.") from error
            if isinstance(error, InvalidConfig):
                raise
            raise TransferFailed(f"weights could not be received ({words[0]}); the old ones stay.") from error

    def _arrivals(self, announced: Announced) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors of each pack. They are gone when the next one is asked for."""
        if self._peers is None:
            raise TransferFailed("no trainer was met, or its group is closed; POST /init_weight_transfer_engine first.")
        packs = list(announced.packs())
        sizes = [sum(each.num_bytes for each in pack) for pack in packs]
        room = [torch.empty(max(sizes[i::2], default=0), dtype=torch.uint8, device=self._device) for i in range(2)]
        coming = self._peers.receive(room[0][: sizes[0]])
        for number, pack in enumerate(packs):
            coming.wait()
            if number + 1 < len(packs):
                coming = self._peers.receive(room[(number + 1) % 2][: sizes[number + 1]])
            yield _unpacked(room[number % 2], pack)

    def _leave(self) -> None:
        if self._peers is not None:
            self._peers.close()
            self._peers = None


def _unpacked(packed_B: Tensor, pack: list[SentTensor]) -> dict[str, Tensor]:
    found, start = {}, 0
    for each in pack:
        part_B = packed_B[start : start + each.num_bytes]
        start += each.num_bytes
        dtype = getattr(torch, each.dtype)
        if part_B.storage_offset() % dtype.itemsize:
            part_B = part_B.clone()  # behind tensors of a narrower type
        found[each.name] = part_B.view(dtype).view(each.shape)
    return found


def _finite(tensors: Iterable[Tensor]) -> bool:
    """Look for numbers that are not finite. The host waits for the device once, however many tensors there are."""
    filled = [each for each in tensors if each.numel()]
    if not filled:
        return True
    greatest = torch._foreach_norm(filled, float("inf"))
    return bool(torch.stack([each.float() for each in greatest]).isfinite().all())
