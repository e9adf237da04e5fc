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

import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.core.specs.model import Sines
from ridgeline.core.specs.stem import HALVINGS, STRIDE, TAPS, GridStem, SoundStem
from ridgeline.kernels.small.log_mel.op import mel_filters
from ridgeline.layers.build import Build
from ridgeline.layers.embedding import SinePositions
from ridgeline.layers.linear import Linear


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
    """A convolution over frames and bands that halves both, with its activation."""

    def __init__(self, inputs: int, outputs: int, build: Build) -> None:
        super().__init__()
        self._ops = build.ops
        self.weight, self.bias = build.parameter(outputs, inputs * TAPS**2), build.parameter(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, outputs, F / 2, t / 2] of [N, inputs, F, t]."""
        weight = self.weight.view(len(self.bias), -1, TAPS, TAPS)
        y = functional.conv2d(x, weight, self.bias, stride=STRIDE, padding=TAPS // 2)
        return self._ops.activation(y.flatten(0, 2), "gelu").view_as(y)


class GridStemLayers(Spectra):
    """The stem of Qwen3-Omni's encoder: from samples to the input of its first layer."""

    def __init__(self, spec: GridStem, width: int, build: Build, sines: Sines) -> None:
        super().__init__(spec.bands, build)
        self.spec = spec
        self.convs = nn.ModuleList(
            GridConv(spec.channels if n else 1, spec.channels, build.within(f"convs.{n}")) for n in range(HALVINGS)
        )
        self.out = Linear(spec.channels * spec.rows, (width,), False, build.within("out"))
        self._sines = SinePositions(sines, spec.positions, width, build)

    def embedded(self, x_NFt: Tensor, valid_N: Tensor | None = None) -> Tensor:
        """Return the convolutions' output with positions added: [N, t / 8, M]. They read zeros as frames."""
        found = []
        for x in x_NFt.split(self.spec.together):
            y = x[:, None]
            for conv in self.convs:
                y = conv(y)
            flat = y.permute(0, 3, 1, 2).flatten(2)
            found.append(self.out(flat.flatten(0, 1)).view(*flat.shape[:2], -1))
        y_NtM = torch.cat(found)
        return y_NtM + self._sines.table_ZM[: y_NtM.shape[1]]
