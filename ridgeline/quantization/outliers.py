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

from ridgeline.quantization.scheme import ScaledWeight

THRESHOLD = 6.0  # magnitude from which an input is an outlier, as in the paper


@dataclass(frozen=True)
class OutlierWeight(ScaledWeight):
    """Levels whose product is of int8 activations, and a dense side product.

    column_C: the inputs of outliers, int64. The levels there multiply zeros.
    dense_OC: their columns of the weight.
    """

    column_C: Tensor
    dense_OC: Tensor

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.column_C.nbytes + self.dense_OC.nbytes

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        outlier_TC = x_TI[:, self.column_C]
        rest_TI = x_TI.index_fill(1, self.column_C, 0.0)
        return super().linear(rest_TI, bias_O) + outlier_TC @ self.dense_OC.to(x_TI.dtype).T
