"""Weights as `int8` has them, packed for oneDNN, and activations rounded likewise when they come, token by token."""

from __future__ import annotations

import torch

from ridgeline.kernels.w8a8_gemm.onednn import pack
from ridgeline.kernels.w8a8_gemm.op import has_vnni
from ridgeline.quantization.rounding import round_rows
from ridgeline.quantization.scheme import PlainWeight, ScaledWeight, Scheme


def prepare(loaded: PlainWeight) -> ScaledWeight:
    """Rounded and packed. The scale, rounded to the weight's dtype, is multiplied with in float32."""
    level_OI = torch.empty(loaded.weight_OI.shape, dtype=torch.int8, device=loaded.weight_OI.device)
    scale_O = round_rows(loaded.weight_OI, level_OI).float()
    if loaded.ops.chosen["w8a8_linear"] == "onednn":
        level_OI = pack(level_OI)
    return ScaledWeight(loaded.ops, loaded.ops.w8a8_linear, level_OI, scale_O)


W8A8 = Scheme(name="w8a8", prepare=prepare, supports=has_vnni, needs="a CPU with VNNI", weight_bytes=1)
