"""A listener's work: samples become vectors, on the device.

Legend:
    N  sounds
    S  samples of the longest, silence included
    L  vectors
    M  numbers of a vector
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.core.plan.reserve import Reserved, StepSizes
from ridgeline.core.plan.sounds import HeardSound
from ridgeline.core.specs.listener import ListenerSpec
from ridgeline.core.specs.stem import SoundStem
from ridgeline.kernels.base.launch import on_device
from ridgeline.kernels.base.sounds import FRAME, HOP
from ridgeline.layers.encoder.listener import Listener
from ridgeline.worker.pictures import bytes_kept, vector_bytes
from ridgeline.worker.upload import upload_sounds

POSITIONS = 24_000  # of several sounds that are heard at once: 16 windows of 30 s


@dataclass(frozen=True)
class ListenerMemory:
    """The activations of what is heard at once, and the vectors that are kept, with those of one more step. apart: the
    listener runs on another device, and its vectors alone are here."""

    listener: ListenerSpec
    apart: bool = False

    def reserve(self, sizes: StepSizes) -> Reserved:
        positions = max(POSITIONS, self.listener.positions)
        fresh = max(positions // self.listener.pooled, sizes.max_tokens)
        return Reserved(
            held=bytes_kept(self.listener, sizes) + fresh * vector_bytes(self.listener, sizes),
            passing=0 if self.apart else positions * self.listener.scratch() * sizes.itemsize,
        )


class HeardSounds:
    """The part of a worker that turns sounds into vectors. The listener may have a device of its own.

    device: where the vectors go.
    """

    def __init__(self, listener: Listener, device: torch.device) -> None:
        self._listener, self._home = listener, device
        self._device = next(listener.parameters()).device
        self.encoded = 0  # sounds so far

    def encode(self, heard: Mapping[str, HeardSound], stored: dict[str, Tensor]) -> None:
        """Store the vectors of sounds under their names: [L, M] each. Sounds that fit together run together."""
        for group in self._groups(heard):
            frames = [self._listener.spec.stem.frames_of(each.num_bytes // 4) for each in group.values()]
            beside = next(iter(group.values())).beside
            with on_device(self._device):
                made_LM = self._listener(self._samples(group.values(), frames), frames, beside=beside)
            vectors_LM = made_LM.to(self._home)
            for name, own_LM in zip(group, vectors_LM.split([each.vectors for each in group.values()]), strict=True):
                stored[name] = own_LM.clone()
            self.encoded += len(group)

    def _samples(self, sounds: Iterable[HeardSound], frames: list[int]) -> Tensor:
        """Return sounds on the device, with silence behind them: float32 [N, S]."""
        spec = self._listener.spec
        whole = isinstance(spec.stem, SoundStem) and not spec.chunk
        most = spec.longest * HOP if whole else max(frames) * HOP + 2 * FRAME // HOP * HOP
        return upload_sounds([sound.samples.data for sound in sounds], most, self._device)

    def _groups(self, heard: Mapping[str, HeardSound]) -> Iterator[dict[str, HeardSound]]:
        group: dict[str, HeardSound] = {}
        for name, each in heard.items():
            most = max((one.patches for one in (*group.values(), each)), default=0)
            other = any(one.beside != each.beside for one in group.values())
            if group and (other or most * (len(group) + 1) > POSITIONS):
                yield group
                group = {}
            group[name] = each
        if group:
            yield group
