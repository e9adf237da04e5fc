"""A weight of 8-bit numbers, E4M3 or int8, as kernels take it.

Legend:
    O  outputs
    I  inputs
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ridgeline.kernels.base.weight_format import Activations


class Eight(NamedTuple):
    """A weight of E4M3 numbers or int8 levels.

    scale: float32 for each output, or for each block of 128 outputs by 128 inputs if `blocked`; contiguous.
    activations: how activations are rounded, as in `Fp8Format`.
    x_scale: float32 [], if they are "static".
    """

    number_OI: Tensor
    scale: Tensor
    blocked: bool = False
    activations: Activations | None = "token"
    x_scale: Tensor | None = None
