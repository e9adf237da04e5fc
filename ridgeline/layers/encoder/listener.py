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

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.core.specs.listener import ListenerSpec
from ridgeline.core.specs.stem import SoundStem
from ridgeline.kernels.attention.packed.op import PackedRows
from ridgeline.layers.build import Build
from ridgeline.layers.encoder.packed import PackedViews
from ridgeline.layers.encoder.tower import summed
from ridgeline.layers.layer import Layer
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm
from ridgeline.layers.stem import GridStemLayers, Stem


class Listener(nn.Module):
    """A listener with its projector, whole on every rank. Its parameters are uninitialised."""

    def __init__(self, spec: ListenerSpec, build: Build) -> None:
        super().__init__()
        build = build.undivided()
        self.spec, self.ops = spec, build.ops
        if isinstance(spec.stem, SoundStem):
            self.stem: Stem | GridStemLayers = Stem(spec.stem, spec.width, build.within("stem"), spec.sines)
        else:
            assert spec.sines is not None
            self.stem = GridStemLayers(spec.stem, spec.width, build.within("stem"), spec.sines)
        self.layers = nn.ModuleList(
            Layer(layer, spec.width, build.within(f"layers.{n}")) for n, layer in enumerate(spec.layers)
        )
        self.norm = Norm(spec.norm, spec.width, build)
        self.up = Linear(spec.width, (spec.hidden,), True, build.within("up")) if spec.hidden else None
        self.projector = Linear(spec.hidden or spec.width, (spec.outputs,), True, build.within("projector"))

    def forward(self, samples_NS: Tensor, frames_N: Sequence[int]) -> Tensor:
        """Return the vectors of float32 sounds with so many frames: [L, M]. At least two frames of silence follow each
        sound, unless it fills a window."""
        x_TW, counts = self._heard(samples_NS, np.asarray(frames_N))
        state, residual_TW = PackedViews(self.ops, PackedRows.of(counts)), None
        places_T = torch.arange(len(x_TW), device=x_TW.device)
        for layer in self.layers:
            x_TW, residual_TW = layer(x_TW, residual_TW, places_T, state, None)
        x_TW = summed(x_TW, residual_TW)
        if self.spec.pooled > 1:
            positions_N = np.array([self.spec.positions_of(each) for each in frames_N])
            first_L = torch.from_numpy(_pairs(positions_N)).to(x_TW.device)
            x_TW = (x_TW[first_L] + x_TW[first_L + 1]) / 2
        x_LW = self.norm(x_TW)[0]
        if self.up is not None:
            x_LW = self.ops.activation(self.up(x_LW), "gelu")
        return self.projector(x_LW)

    def _heard(self, samples_NS: Tensor, frames_N: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Return the input of the first layer, [T, W], and the numbers of positions that see each other."""
        x_NFt, chunk, stem = self.stem.spectra(samples_NS), self.spec.chunk, self.spec.stem
        if not chunk:
            counts = np.array([stem.positions_of(each) for each in frames_N.tolist()])
            found_NtW = self.stem.embedded(x_NFt)
            return torch.cat([each[:count] for each, count in zip(found_NtW, counts, strict=True)]), counts
        own = [
            each_Ft[:, first : min(first + chunk, frames)]
            for each_Ft, frames in zip(x_NFt, frames_N.tolist(), strict=True)
            for first in range(0, frames, chunk)
        ]
        widths = [
            min(chunk, frames) for frames in frames_N.tolist() for _ in range(0, frames, chunk)
        ]  # a sound's last chunk is filled up like its first
        parts: list[Tensor] = [x_NFt] * len(own)
        for width in sorted({*widths}):
            of = [n for n, each in enumerate(widths) if each == width]
            x = torch.stack([functional.pad(own[n], (0, width - own[n].shape[1])) for n in of])
            valid_N = torch.tensor([own[n].shape[1] for n in of], device=x.device)
            for n, each_tW in zip(of, self.stem.embedded(x, valid_N), strict=True):
                parts[n] = each_tW[: stem.positions_of(own[n].shape[1])]
        return torch.cat(parts), self._windows(frames_N)

    def _windows(self, frames_N: np.ndarray) -> np.ndarray:
        """Return the positions that see each other in the layers, one number for each window."""
        spec, found = self.spec, list[int]()
        most = spec.window * spec.stem.positions_of(spec.chunk)
        for frames in frames_N.tolist():
            whole, rest = divmod(spec.positions_of(frames), most)
            found += [most] * whole + [rest] * (rest > 0)
        return np.array(found)


def _pairs(positions_N: np.ndarray) -> np.ndarray:
    """Return the first position of every two of each sound: int64 [L]. A last one by itself is left out."""
    begin_N = np.cumsum(positions_N) - positions_N
    return np.concatenate([begin + 2 * np.arange(n // 2) for begin, n in zip(begin_N, positions_N, strict=True)])
