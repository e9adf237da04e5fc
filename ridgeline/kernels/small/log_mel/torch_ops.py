"""Mel spectra through torch's own Fourier transform, on any device. The legend is that of op.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.small.log_mel.op import framed, hann, scaled


def log_mel(samples_NS: Tensor, filters_FB: Tensor) -> Tensor:
    spectrum_NTB = torch.fft.rfft(framed(samples_NS) * hann(samples_NS.device))
    energy_NTB = spectrum_NTB.real.square() + spectrum_NTB.imag.square()
    return scaled(filters_FB @ energy_NTB.mT)
