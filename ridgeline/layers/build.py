"""What every layer is built from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from ridgeline.core.model_spec import RopeSpec
from ridgeline.kernels.ops import Ops
from ridgeline.layers.rotary import Rotary
from ridgeline.quantization.scheme import Scheme, SchemeOf


@dataclass(frozen=True)
class Build:
    """The ops a layer calls, and the dtype and device of its parameters (left uninitialised for the loader).

    scheme_of: how weights are held, by a module's name. positions: the longest context of this run, by which some
    rotations are scaled. rotary_rows: of the table of angles, where memory holds fewer. name: of the module that is
    being built, as the decoder has it.
    """

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    scheme_of: SchemeOf
    positions: int = 0
    rotary_rows: int | None = None
    name: str = ""
    _rotaries: dict[RopeSpec, Rotary] = field(default_factory=dict)

    def rotary(self, spec: RopeSpec) -> Rotary:
        """The one module of all layers that rotate alike."""
        if spec not in self._rotaries:
            self._rotaries[spec] = Rotary(spec, self.positions, self.rotary_rows, self.device)
        return self._rotaries[spec]

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
