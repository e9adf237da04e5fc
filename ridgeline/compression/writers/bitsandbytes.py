"""bitsandbytes' folders, as transformers saves them.

NF4: two codes in a byte, the first in the high bits, over the flattened weight in blocks of 64.

    weight                                    uint8 [O · I / 2, 1]
    weight.absmax                             float32 [O · I / 64]
    weight.quant_map                          float32 [16]
    weight.quant_state.bitsandbytes__nf4      uint8, a JSON object in UTF-8

int8: weight = int8 · SCB / 127; bitsandbytes looks for outliers when it runs.

    weight         int8 [O, I]
    SCB            float32 [O]
    weight_format  uint8 [], 0 for rows
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from ridgeline.compression.made import Made
from ridgeline.compression.writers import Written
from ridgeline.compression.writers.packing import nibbles
from ridgeline.kernels.gemm.codes.op import TABLES, Coded
from ridgeline.kernels.gemm.plain.levels import LEVELS, Levels
from ridgeline.quantization.outliers import THRESHOLD


class BitsAndBytes:
    def tensors(self, name: str, made: Made, dtype: torch.dtype) -> dict[str, Tensor]:
        if isinstance(made.form, Levels):
            return {
                f"{name}.weight": made.form.level_OI,
                f"{name}.SCB": made.form.scale_O * LEVELS,
                f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8),
            }
        form = made.form
        assert isinstance(form, Coded)
        code_OI = form.codes()
        state = {
            "quant_type": "nf4",
            "blocksize": form.format.group,
            "dtype": str(dtype).removeprefix("torch."),
            "shape": list(code_OI.shape),
        }
        return {
            f"{name}.weight": nibbles(code_OI, first_high=True).reshape(-1, 1),
            f"{name}.weight.absmax": form.scale_OG.float().flatten(),
            f"{name}.weight.quant_map": torch.tensor(TABLES["nf4"]),
            f"{name}.weight.quant_state.bitsandbytes__nf4": torch.tensor(
                list(json.dumps(state).encode()), dtype=torch.uint8
            ),
        }

    def quantization_config(self, model: Written) -> dict[str, Any]:
        four = model.config.schemes[0] == "nf4"
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": four,
            "load_in_8bit": not four,
            "_load_in_4bit": four,
            "_load_in_8bit": not four,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": str(model.dtype).removeprefix("torch."),
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_threshold": THRESHOLD,
            "llm_int8_skip_modules": ["lm_head", *model.kept],
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
        }


WRITER = BitsAndBytes()
