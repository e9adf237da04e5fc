"""A linear map whose weight is int8 levels, each row with a scale of its own. Activations stay as they are.

Legend:
    T  tokens
    I  inputs
    J  inputs, filled up with zeros to whole runs
    O  outputs
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_cpu

RUN = 32  # torch's kernel reads so many inputs at once; of a shorter run it reads beyond the end
LEVELS = 127  # levels to either side of zero


def int8_linear(x_TI: Tensor, level_OJ: Tensor, scale_O: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x · (level · scale)ᵀ + bias: [T, O] in the dtype of `x_TI`. Sums are in float32.

    level_OJ: int8, with zeros behind the I inputs; J is the next multiple of RUN.
    scale_O: in the dtype of x.
    """
    y_TO = (x_TI.float() @ level_OJ[:, : x_TI.shape[1]].float().T) * scale_O.float()
    if bias_O is not None:
        y_TO = y_TO + bias_O.float()
    return y_TO.to(x_TI.dtype)


INT8_LINEAR = Op(
    "int8_linear",
    int8_linear,
    (Implementation("torch", "ridgeline.kernels.gemm.int8.torch_ops:int8_linear", on_cpu),),
    matrix=True,
)
