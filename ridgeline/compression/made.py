"""Quantized matrices, and the weights in memory that multiply with them.

Legend:
    T  tokens
    I  inputs
    O  outputs
    C  columns of outliers
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.gemm.codes.op import Coded
from ridgeline.kernels.gemm.int8.onednn import pack
from ridgeline.kernels.gemm.plain.levels import Levels
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.joined import JoinedWeight
from ridgeline.quantization.make.grids import Form
from ridgeline.quantization.outliers import OutlierWeight
from ridgeline.quantization.weight import Weight, weight_of


@dataclass(frozen=True, kw_only=True)
class Made:
    """A checkpoint's module after quantization, with rows in the checkpoint's order.

    column_C, dense_OC: LLM.int8's outliers.
    """

    scheme: str
    form: Form
    column_C: Tensor | None = None
    dense_OC: Tensor | None = None

    @property
    def nbytes(self) -> int:
        dense = 0 if self.dense_OC is None else 2 * self.dense_OC.numel()
        return self.form.nbytes + dense

    @property
    def numel(self) -> int:
        """The weights that it stands for."""
        if isinstance(self.form, Coded):
            return self.form.code_OB[..., 0].numel() * self.form.inputs
        return self.form[0].numel()

    def dequantized(self) -> Tensor:
        """Return the weight in float32."""
        weight_OI = self.form.dequantized()
        if self.column_C is not None and self.dense_OC is not None:
            weight_OI[:, self.column_C] = self.dense_OC.float()
        return weight_OI

    def to(self, device: torch.device | str) -> Made:
        """Return the same on another device."""
        form = type(self.form)(*(x.to(device) if isinstance(x, Tensor) else x for x in self.form))  # type: ignore[arg-type]
        column, dense = (None if x is None else x.to(device) for x in (self.column_C, self.dense_OC))
        return Made(scheme=self.scheme, form=form, column_C=column, dense_OC=dense)

    def weight(self, ops: Ops) -> Weight:
        """Return the form that a layer multiplies with."""
        form = self.form
        if isinstance(form, Levels) and ops.chosen["w8a8_linear"] == "onednn":
            form = form._replace(level_OI=pack(form.level_OI))
        weight = weight_of(ops, form)
        if self.column_C is None or self.dense_OC is None:
            return weight
        return OutlierWeight(ops, weight, self.column_C, self.dense_OC)


@dataclass(frozen=True)
class ReorderedWeight(JoinedWeight):
    """Weights whose outputs lie in another order than their layer's.

    order_O: the output that each of the layer's is.
    """

    order_O: Tensor

    def linear(self, x_TI: Tensor | Rounded, bias_O: Tensor | None) -> Tensor:
        y_TO = super().linear(x_TI, None)[:, self.order_O]
        return y_TO if bias_O is None else y_TO + bias_O
