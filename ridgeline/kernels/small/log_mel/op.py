"""Logarithms of the energy in the bands of the mel scale, as Whisper reads sound (Radford et al., arXiv 2212.04356,
section 2.2).

A window of sound is mirrored by half a frame at both ends. Every `HOP` samples a frame of `FRAME` samples is weighted
by Hann's window and transformed; the squares of its spectrum are added up in bands. The last frame is left out.

Legend:
    N  windows of sound
    S  samples of a window, a multiple of HOP
    W  samples of a frame
    B  frequencies of a frame's spectrum, from 0 to half the rate
    F  bands
    T  frames of a window
"""

from __future__ import annotations

from functools import lru_cache
from math import log, pi

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.kernels.base.op import Implementation, Op
from ridgeline.kernels.base.sounds import FRAME, HOP, RATE

FLOOR = 1e-10  # of an energy
RANGE = 8.0  # powers of ten below the loudest, at which energies are cut off
LINEAR_HZ, LINEAR_MEL = 1000.0, 15.0  # up to here Slaney's scale is linear
MEL_LOG = log(6.4) / 27  # beyond it, the logarithm of a mel


def log_mel(samples_NS: Tensor, filters_FB: Tensor) -> Tensor:
    """Return log10 of the bands' energies, cut off `RANGE` below each window's loudest, plus 4, over 4: float32
    [N, F, T].

    samples_NS: float32.
    filters_FB: float32, the weights of frequencies in each band (`mel_filters`).
    """
    frames_NTW = framed(samples_NS).double() * hann(samples_NS.device).double()
    angle_WB = torch.outer(torch.arange(FRAME), torch.arange(FRAME // 2 + 1)).double() * (2 * pi / FRAME)
    angle_WB = angle_WB.to(samples_NS.device)
    energy_NTB = (frames_NTW @ angle_WB.cos()).square() + (frames_NTW @ angle_WB.sin()).square()
    return scaled(filters_FB.double() @ energy_NTB.mT).float()


def framed(samples_NS: Tensor) -> Tensor:
    """Return the frames of each window, without the last one: [N, T, W]."""
    mirrored_NS = functional.pad(samples_NS[:, None], (FRAME // 2, FRAME // 2), mode="reflect")[:, 0]
    return mirrored_NS.unfold(1, FRAME, HOP)[:, :-1]


def scaled(energy_NFT: Tensor) -> Tensor:
    """Return energies as the model reads them."""
    log_NFT = energy_NFT.clamp(min=FLOOR).log10()
    return (torch.maximum(log_NFT, log_NFT.amax((1, 2), keepdim=True) - RANGE) + 4) / 4


@lru_cache(8)
def hann(device: torch.device) -> Tensor:
    """Return Hann's window: float32 [W]."""
    return torch.hann_window(FRAME, device=device)


def mel_filters(bands: int) -> np.ndarray:
    """Return triangles between neighbouring points of Slaney's mel scale, each of the same area: float32 [F, B]."""
    mel_F = np.linspace(0.0, _mel(RATE / 2), bands + 2)
    edge_F = np.where(
        mel_F < LINEAR_MEL,
        mel_F * (LINEAR_HZ / LINEAR_MEL),
        LINEAR_HZ * np.exp((mel_F - LINEAR_MEL) * MEL_LOG),
    )
    hertz_B = np.linspace(0, RATE / 2, FRAME // 2 + 1)
    slope_FB = (hertz_B - edge_F[:, None]) / np.diff(edge_F, append=np.inf)[:, None]
    falls_FB = 1 - slope_FB
    triangle_FB = np.minimum(slope_FB[:-2], falls_FB[1:-1]).clip(min=0)
    return (triangle_FB * (2 / (edge_F[2:] - edge_F[:-2]))[:, None]).astype(np.float32)


def _mel(hertz: float) -> float:
    return LINEAR_MEL + log(hertz / LINEAR_HZ) / MEL_LOG


LOG_MEL = Op(
    "log_mel",
    log_mel,
    (Implementation("torch", "ridgeline.kernels.small.log_mel.torch_ops:log_mel"),),
)
