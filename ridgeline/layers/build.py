"""What every layer is built from."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from ridgeline.core.model_spec import RopeSpec
from ridgeline.kernels.ops import Ops
from ridgeline.layers.rotary import Rotary


@dataclass(frozen=True)
class Build:
    """The ops a layer calls, and the dtype and device of its parameters (left uninitialised for the loader).

    positions: the longest context of this run, by which some rotations are scaled. rotary_rows: of the table of angles,
    where memory holds fewer.
    """

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    positions: int = 0
    rotary_rows: int | None = None
    _rotaries: dict[RopeSpec, Rotary] = field(default_factory=dict)

    def rotary(self, spec: RopeSpec) -> Rotary:
        """The one module of all layers that rotate alike."""
        if spec not in self._rotaries:
            self._rotaries[spec] = Rotary(spec, self.positions, self.rotary_rows, self.ops, self.device)
        return self._rotaries[spec]

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """dtype: another than the build's."""
        return nn.Parameter(torch.empty(shape, dtype=dtype or self.dtype, device=self.device))
