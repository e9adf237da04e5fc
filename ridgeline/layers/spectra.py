"""The spectra that encoders of sounds read, in float64: their logarithms have large slopes.

Legend:
    N  sounds
    S  samples of the longest, with what stands around it
    t  frames
    W  samples of a frame
    B  frequencies of a frame's spectrum, from 0 to half the rate
    F  bands
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.core.specs.spectra import SpectraSpec
from ridgeline.kernels.base.sounds import HOP, RATE

TOGETHER = 1024  # frames of each sound, which take some 13 kB while they are transformed


def spectra(samples_NS: Tensor, spec: SpectraSpec) -> Tensor:
    """Return the logarithms of what each band holds: float32 [N, F, t]. samples_NS: float32, with zeros behind each
    sound."""
    frames_NtW = functional.pad(samples_NS, (spec.before, 0)).unfold(1, spec.frame, HOP)
    window_W, bands_FB = _tables(spec, samples_NS.device)
    found = [_of_frames(part_NtW, spec, window_W, bands_FB) for part_NtW in frames_NtW.split(TOGETHER, dim=1)]
    return torch.cat(found, dim=2)


def _of_frames(frames_NtW: Tensor, spec: SpectraSpec, window_W: Tensor, bands_FB: Tensor) -> Tensor:
    frames_NtW = frames_NtW.double()
    if spec.preemphasis:
        before_NtW = torch.cat((frames_NtW[..., :1], frames_NtW[..., :-1]), dim=-1)
        frames_NtW = frames_NtW - spec.preemphasis * before_NtW
    found_NtB = torch.fft.rfft(frames_NtW * (spec.scale * window_W), n=spec.transformed).abs() ** spec.power
    energy_NFt = bands_FB @ found_NtB.mT
    return (energy_NFt.clamp(min=spec.floor) if spec.cut else energy_NFt + spec.floor).log().float()


@lru_cache(8)
def _tables(spec: SpectraSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the window and the weights of frequencies in each band: float64 [W] and [F, B]."""
    if spec.window == "hamming":
        window_W = torch.hamming_window(spec.frame, periodic=False, dtype=torch.float64)
    else:
        window_W = torch.hann_window(spec.frame, dtype=torch.float64)
    return window_W.to(device), torch.from_numpy(triangles(spec)).to(device)


def triangles(spec: SpectraSpec) -> np.ndarray:
    """Return the triangle of each band, whose ends are the middles of its neighbours: float64 [F, B]."""
    edge_F = np.linspace(_mel(spec.lowest), _mel(spec.highest), spec.bands + 2)
    point_B = np.arange(spec.transformed // 2 + 1) * (RATE / spec.transformed)
    if spec.in_mel:
        point_B = _mel(point_B)
    else:
        edge_F = 700 * (10 ** (edge_F / 2595) - 1)
    slope_FB = (point_B - edge_F[:-1, None]) / np.diff(edge_F)[:, None]
    return np.minimum(slope_FB[:-1], 1 - slope_FB[1:]).clip(min=0)


def _mel(hertz: np.ndarray | float) -> np.ndarray:
    return 2595 * np.log10(1 + np.asarray(hertz, np.float64) / 700)
