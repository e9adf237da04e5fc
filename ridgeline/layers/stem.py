"""The first layers of an encoder that reads sounds: convolutions as products.

Legend:
    N  windows of sound
    S  samples of a window
    F  bands, or channels
    T  positions, of all windows
    t  frames of a window
    M  model width
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.core.specs.model import Sines
from ridgeline.core.specs.stem import STRIDE, TAPS, GridStem, SoundStem
from ridgeline.kernels.small.log_mel.op import mel_filters
from ridgeline.layers.build import Build
from ridgeline.layers.embedding import SinePositions
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm
from ridgeline.layers.precision import in_float32
from ridgeline.layers.spectra import spectra


class Spectra(nn.Module):
    """The beginning of a stem, which has no parameters."""

    def __init__(self, bands: int, build: Build) -> None:
        super().__init__()
        self._ops, self._dtype, self._bands = build.ops, build.dtype, bands
        self._filters_FB: Tensor | None = None

    def spectra(self, samples_NS: Tensor) -> Tensor:
        """Return the spectra of float32 samples, which the convolutions read: [N, F, t]."""
        if self._filters_FB is None:
            self._filters_FB = torch.from_numpy(mel_filters(self._bands)).to(samples_NS.device)
        return self._ops.log_mel(samples_NS, self._filters_FB).to(self._dtype)


class Stem(Spectra):
    """The stem of Whisper's encoder: from samples to the input of its first layer. sines: how positions are computed;
    None: they are learned."""

    def __init__(self, spec: SoundStem, width: int, build: Build, sines: Sines | None = None) -> None:
        super().__init__(spec.bands, build)
        self.spec = spec
        self.conv1 = Linear(TAPS * spec.bands, (width,), True, build.within("conv1"))
        self.conv2 = Linear(TAPS * width, (width,), True, build.within("conv2"))
        self._sines = None if sines is None else SinePositions(sines, spec.positions, width, build)
        self.positions = build.parameter(spec.positions, width) if sines is None else None

    def forward(self, samples_NS: Tensor) -> Tensor:
        """Return the input of the first layer of float32 windows: [T, M], one window behind the other."""
        return self.embedded(self.spectra(samples_NS)).flatten(0, 1)

    def embedded(self, x_NFt: Tensor, valid_N: Tensor | None = None) -> Tensor:
        """Return the convolutions' output with positions added: [N, t / 2, M]. valid_N: frames of each, behind which
        the second convolution reads zeros; None: it reads all."""
        x_NtM = self._convolved(self.conv1, x_NFt, 1).view(len(x_NFt), x_NFt.shape[2], -1)
        if valid_N is not None:
            x_NtM = x_NtM * (torch.arange(x_NtM.shape[1], device=x_NtM.device) < valid_N[:, None])[..., None]
        y_NtM = self._convolved(self.conv2, x_NtM.mT, STRIDE).view(len(x_NFt), -1, x_NtM.shape[2])
        table_ZM = self.positions if self._sines is None else self._sines.table_ZM
        assert table_ZM is not None
        return y_NtM + table_ZM[: y_NtM.shape[1]]

    def _convolved(self, conv: Linear, x_NFt: Tensor, stride: int) -> Tensor:
        """Return the activated output of a convolution whose input has one zero at both ends: [N * t, M]."""
        taps = functional.pad(x_NFt, (TAPS // 2, TAPS // 2)).unfold(2, TAPS, stride)
        y_TM: Tensor = self._ops.activation(conv(taps.transpose(1, 2).flatten(2).flatten(0, 1)), "gelu")
        return y_TM


class GridConv(nn.Module):
    """A convolution over frames and bands that halves both, with its norm and its activation. each: it convolves every
    channel by itself, and a map of a place's channels follows."""

    def __init__(self, spec: GridStem, inputs: int, outputs: int, each: bool, build: Build) -> None:
        super().__init__()
        self._ops, self._activation, self._each = build.ops, spec.activation, each
        made = inputs if each else outputs
        self.weight = build.parameter(made, (1 if each else inputs) * TAPS**2)
        self.bias = build.parameter(made) if spec.bias else None
        self.point = Linear(inputs, (outputs,), spec.bias, build.within("point")) if each else None
        self.norm = None if spec.norm is None else Norm(spec.norm, outputs, build)
        self.scale = build.parameter(outputs) if spec.cumulative else None
        self._eps = spec.cumulative

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, outputs, F / 2, t / 2] of [N, inputs, F, t], or with frames before bands."""
        weight = self.weight.view(len(self.weight), -1, TAPS, TAPS)
        groups, padding = len(weight) if self._each else 1, TAPS // 2
        if self.scale is not None:
            x, padding = functional.pad(x, (1, 1, 0, TAPS - 1)), 0
        with in_float32():
            y = functional.conv2d(x, weight, self.bias, stride=STRIDE, padding=padding, groups=groups)
        if self.scale is not None:
            y = (normed_so_far(y.float(), self._eps) * self.scale[:, None, None].float()).to(y.dtype)
        if self.point is not None or self.norm is not None:
            of_place = y.permute(0, 2, 3, 1)
            flat = of_place.flatten(0, 2)
            flat = flat if self.point is None else self.point(flat)
            flat = flat if self.norm is None else self.norm(flat.contiguous())[0]
            y = flat.view(*of_place.shape[:3], -1).permute(0, 3, 1, 2)
        return self._ops.activation(y.contiguous().flatten(0, 2), self._activation).view(y.shape)


def normed_so_far(y: Tensor, eps: float) -> Tensor:
    """Return [N, channels, t, F] normalized by all numbers of the frames so far. A deviation is that from the mean
    which held at its own frame."""
    numbers = y.shape[1] * y.shape[3]
    count_t1 = numbers * torch.arange(1, y.shape[2] + 1, device=y.device, dtype=y.dtype)[:, None]
    apart = y - y.sum((1, 3), keepdim=True).cumsum(2) / count_t1
    return apart * torch.rsqrt(apart.square().sum((1, 3), keepdim=True).cumsum(2) / count_t1 + eps)


class GridStemLayers(Spectra):
    """The layers of a `GridStem`: from samples to the input of the first of the encoder. sines: how positions are
    computed; None: there are none."""

    def __init__(self, spec: GridStem, width: int, build: Build, sines: Sines | None) -> None:
        super().__init__(spec.bands, build)
        self.spec = spec
        self.mean, self.factor = (build.parameter(spec.bands) if spec.standardized else None for _ in range(2))
        self.convs = nn.ModuleList(
            GridConv(spec, inputs, outputs, spec.separable and n > 0, build.within(f"convs.{n}"))
            for n, (inputs, outputs) in enumerate(pairwise((1, *spec.channels)))
        )
        self.out = Linear(spec.channels[-1] * spec.rows, (width,), spec.out_bias, build.within("out"))
        self._sines = None if sines is None else SinePositions(sines, spec.positions, width, build)

    def spectra(self, samples_NS: Tensor) -> Tensor:
        if self.spec.spectra is None:
            return super().spectra(samples_NS)
        x_NFt = spectra(samples_NS, self.spec.spectra).to(self._dtype)
        if self.mean is None or self.factor is None:
            return x_NFt
        return (x_NFt - self.mean[:, None]) * self.factor[:, None]

    def embedded(self, x_NFt: Tensor, valid_N: Tensor | None = None) -> Tensor:
        """Return the convolutions' output with positions added: [N, t / 8, M]. They read zeros as frames."""
        y_NtM = torch.cat([self._mapped(x_NFt) for x_NFt in x_NFt.split(self.spec.together)])
        return y_NtM if self._sines is None else y_NtM + self._sines.table_ZM[: y_NtM.shape[1]]

    def sound(self, x_Ft: Tensor) -> Tensor:
        """Return the convolutions' output for one sound of any length, part by part: [positions, M]. A part but the
        first reads the frames of one position before it, whose output is left out: what would be zeros otherwise lies
        there."""
        step, found = self.spec.shrinks, []
        if self.spec.cumulative:
            return self._mapped(x_Ft[None])[0]
        for first in range(0, self.spec.positions_of(x_Ft.shape[1]), self.spec.together):
            before = min(first, 1)
            part_Ft = x_Ft[:, step * (first - before) : step * (first + self.spec.together)]
            found.append(self._mapped(part_Ft[None])[0, before:])
        return torch.cat(found)

    def _mapped(self, x_NFt: Tensor) -> Tensor:
        """Return the map's output, [N, positions, M]."""
        spec, y = self.spec, (x_NFt.mT if self.spec.frames_first else x_NFt)[:, None]
        for conv in self.convs:
            y = conv(y)
        y_NXFt = y.mT if spec.frames_first else y
        flat_NtX = y_NXFt.permute((0, 3, 2, 1) if spec.channels_last else (0, 3, 1, 2)).flatten(2)
        return self.out(flat_NtX.flatten(0, 1)).view(*flat_NtX.shape[:2], -1)
