"""The scheme "int8": weights are int8 levels with a scale for each output, and activations stay as they are.

Legend:
    I  inputs
    J  inputs, filled up with zeros to whole runs
    O  outputs
"""

from __future__ import annotations

import torch

from ridgeline.kernels.base.op import on_cpu
from ridgeline.kernels.gemm.int8.op import RUN
from ridgeline.quantization.rounding import round_rows
from ridgeline.quantization.scheme import PlainWeight, ScaledWeight, Scheme


def prepare(loaded: PlainWeight) -> ScaledWeight:
    """Round a weight to levels, and fill its inputs up with zeros to whole runs."""
    outputs, inputs = loaded.weight_OI.shape
    level_OJ = torch.zeros(outputs, -(-inputs // RUN) * RUN, dtype=torch.int8, device=loaded.weight_OI.device)
    scale_O = round_rows(loaded.weight_OI, level_OJ)
    return ScaledWeight(loaded.ops, loaded.ops.int8_linear, level_OJ, scale_O)


INT8 = Scheme(name="int8", prepare=prepare, supports=on_cpu, needs="a CPU", weight_bytes=1)
