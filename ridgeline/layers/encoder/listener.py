"""The network that turns sounds into vectors. Sounds, or their chunks, lie packed behind one another.

Legend:
    N  sounds, or chunks of them
    S  samples of the longest sound, silence included
    F  bands
    t  frames
    T  positions of all sounds
    W  width of the listener
    L  vectors
    M  numbers of a vector
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.core.specs.listener import POOLED, ListenerSpec
from ridgeline.core.specs.stem import STRIDE
from ridgeline.kernels.attention.packed.op import PackedRows
from ridgeline.layers.build import Build
from ridgeline.layers.encoder.packed import PackedViews
from ridgeline.layers.layer import Layer
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm
from ridgeline.layers.stem import Stem
from ridgeline.parallel.axis import ALONE
from ridgeline.parallel.mesh import Mesh


class Listener(nn.Module):
    """A listener with its projector, whole on every rank. Its parameters are uninitialised."""

    def __init__(self, spec: ListenerSpec, build: Build) -> None:
        super().__init__()
        build = replace(build, mesh=Mesh(), sums=ALONE, pending=ALONE, waiting=(), _rotaries={}, _shared={})
        self.spec, self.ops = spec, build.ops
        self.stem = Stem(spec.stem, spec.width, build.within("stem"), spec.sines)
        self.layers = nn.ModuleList(
            Layer(layer, spec.width, build.within(f"layers.{n}")) for n, layer in enumerate(spec.layers)
        )
        self.norm = Norm(spec.norm, spec.width, build)
        self.projector = Linear(spec.width, (spec.outputs,), True, build.within("projector"))

    def forward(self, samples_NS: Tensor, frames_N: Sequence[int]) -> Tensor:
        """Return the vectors of float32 sounds with so many frames: [L, M]. At least two frames of silence follow each
        sound, unless it fills a window."""
        x_TW, counts = self._heard(samples_NS, np.asarray(frames_N))
        state, residual_TW = PackedViews(self.ops, PackedRows.of(counts)), None
        places_T = torch.arange(len(x_TW), device=x_TW.device)
        for layer in self.layers:
            x_TW, residual_TW = layer(x_TW, residual_TW, places_T, state, None)
        x_TW = x_TW if residual_TW is None else x_TW + residual_TW
        first_L = torch.from_numpy(_pairs(-(-np.asarray(frames_N) // STRIDE))).to(x_TW.device)
        x_LW = (x_TW[first_L] + x_TW[first_L + 1]) / POOLED
        return self.projector(self.norm(x_LW)[0])

    def _heard(self, samples_NS: Tensor, frames_N: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Return the input of the first layer, [T, W], and the positions of each sound or chunk."""
        x_NFt, chunk = self.stem.spectra(samples_NS), self.spec.chunk
        valid_N = frames_N
        if chunk:
            own = [
                each_Ft[:, first : min(first + chunk, frames)]
                for each_Ft, frames in zip(x_NFt, frames_N.tolist(), strict=True)
                for first in range(0, frames, chunk)
            ]
            valid_N = np.array([each_Ft.shape[1] for each_Ft in own])
            x_NFt = torch.stack([functional.pad(each_Ft, (0, chunk - each_Ft.shape[1])) for each_Ft in own])
        counts = -(-valid_N // STRIDE)
        found_NtW = self.stem.embedded(x_NFt, torch.from_numpy(valid_N).to(x_NFt.device) if chunk else None)
        place = np.concatenate([np.arange(count) + n * found_NtW.shape[1] for n, count in enumerate(counts)])
        return found_NtW.flatten(0, 1)[torch.from_numpy(place).to(found_NtW.device)], counts


def _pairs(positions_N: np.ndarray) -> np.ndarray:
    """Return the first position of every two of each sound: int64 [L]. A last one by itself is left out."""
    begin_N = np.cumsum(positions_N) - positions_N
    return np.concatenate(
        [begin + POOLED * np.arange(n // POOLED) for begin, n in zip(begin_N, positions_N, strict=True)]
    )
