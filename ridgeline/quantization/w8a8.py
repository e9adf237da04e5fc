"""The scheme "w8a8": weights are int8 levels, packed for oneDNN on CPUs, and each token's activations are rounded when
they arrive.

Legend:
    I  inputs
    O  outputs
"""

from __future__ import annotations

import torch

from ridgeline.kernels.op import Platform, on_gpu
from ridgeline.kernels.w8a8_gemm.onednn import pack
from ridgeline.kernels.w8a8_gemm.op import has_vnni
from ridgeline.quantization.rounding import round_rows
from ridgeline.quantization.scheme import PlainWeight, ScaledWeight, Scheme


def prepare(loaded: PlainWeight) -> ScaledWeight:
    """Round and pack a weight. Its scales are rounded to the weight's dtype, then held in float32 for the products."""
    level_OI = torch.empty(loaded.weight_OI.shape, dtype=torch.int8, device=loaded.weight_OI.device)
    scale_O = round_rows(loaded.weight_OI, level_OI).float()
    if loaded.ops.chosen["w8a8_linear"] == "onednn":
        level_OI = pack(level_OI)
    return ScaledWeight(loaded.ops, loaded.ops.w8a8_linear, level_OI, scale_O)


def _supports(platform: Platform) -> bool:
    return has_vnni(platform) or on_gpu(platform)


W8A8 = Scheme(name="w8a8", prepare=prepare, supports=_supports, needs="a GPU, or a CPU with VNNI", weight_bytes=1)
