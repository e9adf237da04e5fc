"""The scheme "w8a8": weights are int8 levels with a scale for each output, and each token's activations are rounded
when they arrive.

Legend:
    I  inputs
    O  outputs
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.base.native import has_compiler
from ridgeline.kernels.base.op import Platform, has_byte_products, on_gpu
from ridgeline.kernels.gemm.int8.op import has_vnni
from ridgeline.kernels.gemm.plain.levels import Levels
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.layout import laid_out
from ridgeline.quantization.rounding import round_rows
from ridgeline.quantization.scheme import Scheme
from ridgeline.quantization.weight import Weight


def prepare(ops: Ops, weight_OI: Tensor) -> Weight:
    """Round a weight, and lay it out for the fastest product there is. Its scales are rounded to the weight's dtype,
    then held in float32."""
    level_OI = torch.empty(weight_OI.shape, dtype=torch.int8, device=weight_OI.device)
    scale_O = round_rows(weight_OI, level_OI).float()
    return laid_out(ops, Levels(level_OI, scale_O), weight_OI.dtype)


def has_products(platform: Platform) -> bool:
    """Return True where one of the fast products runs."""
    return on_gpu(platform) or has_vnni(platform) or (has_byte_products(platform) and has_compiler())


W8A8 = Scheme(
    name="w8a8",
    prepare=prepare,
    supports=has_products,
    needs="a GPU, or a CPU with VNNI, or with AVX2 and a C++ compiler",
    weight_bytes=1,
    product_bytes=1.0,
    product_rate="int8",
)
