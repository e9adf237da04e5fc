"""LLM.int8 (Dettmers et al., arXiv 2208.07339): int8 levels by int8 levels, but for the few inputs with outliers, whose
columns are multiplied in the activations' own dtype.

The paper looks for outliers at every step. Here they are those of the calibration text, so no step waits for a count.

Legend:
    T  tokens
    I  inputs
    O  outputs
    C  columns of outliers
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.weight import Weight

THRESHOLD = 6.0  # magnitude from which an input is an outlier, as in the paper


@dataclass(frozen=True)
class OutlierWeight(Weight):
    """Levels whose product is of int8 activations, and a dense side product.

    rest: the levels.
    column_C: the inputs of outliers, int64. The levels there multiply zeros.
    dense_OC: their columns of the weight.
    """

    ops: Ops
    rest: Weight
    column_C: Tensor
    dense_OC: Tensor

    @property
    def nbytes(self) -> int:
        return self.rest.nbytes + self.column_C.nbytes + self.dense_OC.nbytes

    @property
    def stored(self) -> Tensor:
        return self.rest.stored

    def linear(self, x_TI: Tensor | Rounded, bias_O: Tensor | None) -> Tensor:
        assert isinstance(x_TI, Tensor)  # this weight gives no buffer for others
        outlier_TC = x_TI[:, self.column_C]
        rest_TI = x_TI.index_fill(1, self.column_C, 0.0)
        return self.rest.linear(rest_TI, bias_O) + outlier_TC @ self.dense_OC.to(x_TI.dtype).T
