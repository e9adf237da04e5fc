"""What every layer is built from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from ridgeline.kernels.ops import Ops
from ridgeline.quantization.scheme import Scheme, SchemeOf


@dataclass(frozen=True)
class Build:
    """The ops a layer calls, and the dtype and device of its parameters (left uninitialised for the loader).

    scheme_of: how weights are held, by a module's name. name: of the module that is being built, as the decoder has it.
    """

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    scheme_of: SchemeOf
    name: str = ""

    def within(self, name: str) -> Build:
        """For a part of the module, which keeps it as an attribute of that name."""
        return replace(self, name=f"{self.name}.{name}" if self.name else name)

    @property
    def scheme(self) -> Scheme:
        """How this module's weight is held."""
        return self.scheme_of(self.name)

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """dtype: another than the build's."""
        return nn.Parameter(torch.empty(shape, dtype=dtype or self.dtype, device=self.device))
