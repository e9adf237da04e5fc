"""DeepSeek's FP8 folders, which transformers calls fine-grained: E4M3 in blocks of 128 × 128.

weight            float8_e4m3fn [O, I]
weight_scale_inv  float32 [ceil(O / 128), ceil(I / 128)]   what the numbers are multiplied by
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.compression.made import Made
from ridgeline.compression.writers import Written
from ridgeline.kernels.base.weight_format import BLOCK
from ridgeline.kernels.gemm.fp8.op import Fp8


class Fp8Blocks:
    def tensors(self, name: str, made: Made, dtype: torch.dtype) -> dict[str, Tensor]:
        assert isinstance(made.form, Fp8)
        return {f"{name}.weight": made.form.weight_OI, f"{name}.weight_scale_inv": made.form.scale_SC}

    def quantization_config(self, model: Written) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head", *model.kept],
        }


WRITER = Fp8Blocks()
