"""The precision in which torch's own functions multiply float32 numbers on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def in_float32() -> AbstractContextManager[None]:
    """Keep cuDNN's convolutions and LSTMs from rounding the float32 numbers that they multiply to the 10 bits of TF32,
    which is its default. Other types, and CPUs, do as before."""
    found: AbstractContextManager[None] = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    return found
