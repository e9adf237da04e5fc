"""A weight as int8 levels with a scale for each output.

Legend:
    I  inputs
    O  outputs
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ridgeline.kernels.base.onednn import num_bytes
from ridgeline.kernels.base.weight_format import Int8Format

LEVELS = 127  # levels to either side of zero


class Levels(NamedTuple):
    """weight = level * scale.

    level_OI: int8. The products of `w8a8_linear` also take the result of int8/onednn.py's `pack`; those of
        `int8_linear` need zeros behind the inputs, to a multiple of int8/op.py's RUN.
    scale_O: float32, for `int8_linear` in the dtype of x.
    """

    level_OI: Tensor
    scale_O: Tensor
    format: Int8Format = Int8Format()

    @property
    def nbytes(self) -> int:
        return num_bytes(self.level_OI) + self.scale_O.nbytes

    @property
    def stored(self) -> Tensor:
        return self.level_OI

    def dequantized(self) -> Tensor:
        """Return the weight in float32."""
        return self.level_OI.float() * self.scale_O.float()[..., None]
