"""The scheme "int8": weights are int8 levels with a scale for each output, and activations stay as they are.

Legend:
    I  inputs
    J  inputs, filled up with zeros to whole runs
    O  outputs
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.base.op import on_cpu
from ridgeline.kernels.gemm.int8.op import KEPT, RUN
from ridgeline.kernels.gemm.plain.levels import Levels
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.rounding import round_rows
from ridgeline.quantization.scheme import Scheme
from ridgeline.quantization.weight import Weight, weight_of


def prepare(ops: Ops, weight_OI: Tensor) -> Weight:
    """Round a weight to levels, and fill its inputs up with zeros to whole runs."""
    outputs, inputs = weight_OI.shape
    level_OJ = torch.zeros(outputs, -(-inputs // RUN) * RUN, dtype=torch.int8, device=weight_OI.device)
    return weight_of(ops, Levels(level_OJ, round_rows(weight_OI, level_OJ), KEPT))


INT8 = Scheme(name="int8", prepare=prepare, supports=on_cpu, needs="a CPU", weight_bytes=1, product_bytes=1.0)
