"""The long convolution by Fourier transforms: n log n operations for n tokens, where the direct sum has n².

The legend is that of op.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.long_convolution.op import check_length
from ridgeline.kernels.turns import Turns


def long_convolution(x_TX: Tensor, filter_XL: Tensor, skip_X: Tensor, turns: Turns) -> Tensor:
    y_TX = torch.zeros_like(x_TX, memory_format=torch.contiguous_format)
    for row in turns.rows():
        length = row.end - row.start
        check_length(length, filter_XL)
        size = 1 << (2 * length - 1).bit_length()  # room for what would else come round to the beginning
        x_XL = x_TX[row.start : row.end].T.float()
        spectrum = torch.fft.rfft(x_XL, size) * torch.fft.rfft(filter_XL[:, :length].float(), size)
        y_XL = torch.fft.irfft(spectrum, size)[:, :length] + skip_X.float()[:, None] * x_XL
        y_TX[row.start : row.end] = y_XL.T.to(y_TX.dtype)
    return y_TX
