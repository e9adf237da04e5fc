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
        build = build.undivided(positions=max(spec.row, 1))
        self.spec, self.ops = spec, build.ops
        if isinstance(spec.stem, SoundStem):
            self.stem: Stem | GridStemLayers = Stem(spec.stem, spec.width, build.within("stem"), spec.sines)
        else:
            self.stem = GridStemLayers(spec.stem, spec.width, build.within("stem"), spec.sines)
        inside = replace(build, clipped=spec.clipped)
        self.layers = nn.ModuleList(
            Layer(layer, spec.width, inside.within(f"layers.{n}")) for n, layer in enumerate(spec.layers)
        )
        self.norms = nn.ModuleList()
        if spec.block and spec.block_norm is not None:
            self.norms.extend(Norm(spec.block_norm, spec.width, build) for _ in range(len(spec.layers) // spec.block))
        self.norm = None if spec.norm is None else Norm(spec.norm, spec.width, build)
        self.up = Linear(spec.width, (spec.hidden,), True, build.within("up")) if spec.hidden else None
        self.between = None if spec.between is None else Norm(spec.between, spec.hidden, build)
        read = spec.hidden or spec.width
        self.projector = Linear(read, (spec.outputs,), spec.out_bias, build.within("projector"))
        self.behind = None if spec.behind is None else Norm(spec.behind, spec.outputs, build)
        self.marks = build.parameter(spec.marks.rows, spec.width) if spec.marks is not None else None
        self.marks_norm = None if spec.marks is None else Norm(spec.marks.norm, spec.width, build)
        self.beside: BesidePictures | None = BesidePictures(spec, build.within("beside")) if spec.apart else None

    def forward(self, samples_NS: Tensor, frames_N: Sequence[int], *, beside: bool = False) -> Tensor:
        """Return the vectors of float32 sounds with so many frames: [L, M]. At least two frames of silence follow each
        sound, unless it fills a window. beside: pictures stand in their prompts too."""
        x_TW, counts, kept_T = self._heard(samples_NS, np.asarray(frames_N))
        state, residual_TW = PackedViews(self.ops, PackedRows.of(counts)), None
        places_T = torch.arange(len(x_TW), device=x_TW.device)
        for index, layer in enumerate(self.layers):
            x_TW, residual_TW = layer(x_TW, residual_TW, places_T, state, None)
            if self.norms and (index + 1) % self.spec.block == 0:
                x_TW, residual_TW = self.norms[index // self.spec.block](x_TW, residual_TW)[0], None
        x_TW = summed(x_TW, residual_TW)
        if kept_T is not None:
            x_TW = x_TW[kept_T]
        if self.spec.pooled > 1:
            positions_N = np.array([self.spec.positions_of(each) for each in frames_N])
            first_L = torch.from_numpy(_pairs(positions_N)).to(x_TW.device)
            x_TW = (x_TW[first_L] + x_TW[first_L + 1]) / 2
        vectors = [-(-self.spec.positions_of(each) // self.spec.every) for each in frames_N]
        if self.spec.every > 1:
            x_TW = x_TW[self._firsts(frames_N).to(x_TW.device)]
        x_LW = x_TW if self.norm is None else self.norm(x_TW)[0]
        own = self.beside if beside and self.beside is not None else self
        if own.up is not None:
            y_LW = own.up(x_LW)
            x_LW = self.ops.activation(y_LW, "gelu") if self.between is None else self.between(y_LW)[0]
        found_LM: Tensor = own.projector(x_LW)
        found_LM = found_LM if self.behind is None else self.behind(found_LM)[0]
        return found_LM if self.spec.marks is None else self._marked(found_LM.split(vectors))

    def _firsts(self, frames_N: Sequence[int]) -> Tensor:
        """Return the first of each `every` positions of all sounds: int64 [L]."""
        counts = [self.spec.positions_of(each) for each in frames_N]
        begins = np.cumsum([0, *counts[:-1]])
        firsts = [begin + np.arange(0, count, self.spec.every) for begin, count in zip(begins, counts, strict=True)]
        return torch.from_numpy(np.concatenate(firsts))

    def _marked(self, sounds: Sequence[Tensor]) -> Tensor:
        """Return the vectors of sounds, each with its marks behind it: [L, M]."""
        marks = self.spec.marks
        assert marks is not None
        assert self.marks is not None
        assert self.marks_norm is not None
        made_2M = self.projector(self.marks_norm(self.marks[[marks.filler, marks.end]])[0])
        filler_M, end_M = made_2M if self.behind is None else self.behind(made_2M)[0]
        parts = [(each, filler_M.expand(marks.filled - len(each), -1), end_M[None]) for each in sounds]
        return torch.cat([part for each in parts for part in each])

    def _heard(self, samples_NS: Tensor, frames_N: np.ndarray) -> tuple[Tensor, np.ndarray, Tensor | None]:
        """Return the input of the first layer, [T, W], the numbers of positions that see each other, and the positions
        that are none of a row's filling (None: all)."""
        x_NFt, chunk, stem = self.stem.spectra(samples_NS), self.spec.chunk, self.spec.stem
        if not chunk and isinstance(self.stem, GridStemLayers):
            return self._in_rows([
                self.stem.sound(each[:, :frames]) for each, frames in zip(x_NFt, frames_N.tolist(), strict=True)
            ])  # fmt: skip
        if not chunk:
            counts = np.array([stem.positions_of(each) for each in frames_N.tolist()])
            found_NtW = self.stem.embedded(x_NFt)
            return torch.cat([each[:count] for each, count in zip(found_NtW, counts, strict=True)]), counts, None
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
        return torch.cat(parts), self._windows(frames_N), None

    def _in_rows(self, sounds: list[Tensor]) -> tuple[Tensor, np.ndarray, Tensor | None]:
        """Return sounds, [positions, W] each, as `_heard` does."""
        most, counts, kept, begin = self.spec.row, list[int](), list[np.ndarray](), 0
        if not most or all(len(each) <= most for each in sounds):
            return torch.cat(sounds), np.array([len(each) for each in sounds]), None
        for number, each in enumerate(sounds):
            kept.append(begin + np.arange(len(each)))
            if len(each) > most:
                sounds[number] = functional.pad(each, (0, 0, 0, -len(each) % most))
            rows = max(1, len(sounds[number]) // most)
            counts += [len(sounds[number]) // rows] * rows
            begin += len(sounds[number])
        x_TW = torch.cat(sounds)
        return x_TW, np.array(counts), torch.from_numpy(np.concatenate(kept)).to(x_TW.device)

    def _windows(self, frames_N: np.ndarray) -> np.ndarray:
        """Return the positions that see each other in the layers, one number for each window."""
        spec, found = self.spec, list[int]()
        most = spec.window * spec.stem.positions_of(spec.chunk)
        for frames in frames_N.tolist():
            whole, rest = divmod(spec.positions_of(frames), most)
            found += [most] * whole + [rest] * (rest > 0)
        return np.array(found)


class BesidePictures(nn.Module):
    """The projector of sounds that stand beside pictures in a prompt."""

    def __init__(self, spec: ListenerSpec, build: Build) -> None:
        super().__init__()
        self.up = Linear(spec.width, (spec.hidden,), True, build.within("up")) if spec.hidden else None
        self.projector = Linear(spec.hidden or spec.width, (spec.outputs,), spec.out_bias, build.within("projector"))


def _pairs(positions_N: np.ndarray) -> np.ndarray:
    """Return the first position of every two of each sound: int64 [L]. A last one by itself is left out."""
    begin_N = np.cumsum(positions_N) - positions_N
    return np.concatenate([begin + 2 * np.arange(n // 2) for begin, n in zip(begin_N, positions_N, strict=True)])
