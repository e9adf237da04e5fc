"""What every layer is built from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ridgeline.kernels.ops import Ops


@dataclass(frozen=True)
class Build:
    """The ops a layer calls, and the dtype and device of its parameters (left uninitialised for the loader)."""

    ops: Ops
    dtype: torch.dtype
    device: torch.device

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """dtype: another than the build's."""
        return nn.Parameter(torch.empty(shape, dtype=dtype or self.dtype, device=self.device))
