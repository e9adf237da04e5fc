"""GPTQ's folders, as AutoGPTQ and GPTQModel write them (checkpoint_format "gptq").

    qweight  int32 [I · bits / 32, O]   codes packed along inputs
    qzeros   int32 [G, O · bits / 32]   zeros less one, packed along outputs
    scales   float16 [G, O]
    g_idx    int32 [I]                  the group of each input

Legend:
    I  inputs
    O  outputs
    G  groups
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from ridgeline.compression.made import Made
from ridgeline.compression.schemes import SCHEMES
from ridgeline.compression.writers import Written
from ridgeline.compression.writers.packing import words
from ridgeline.kernels.gemm.codes.op import Coded


class Gptq:
    def tensors(self, name: str, made: Made, dtype: torch.dtype) -> dict[str, Tensor]:
        form = made.form
        assert isinstance(form, Coded)
        bits, code_OI = form.format.bits, form.codes()
        groups, inputs = form.scale_OG.shape[1], form.inputs
        group_I = (torch.arange(inputs, device=code_OI.device) // (inputs // groups)).int()
        if form.order_I is not None:
            order = form.order_I.long()
            code_OI = torch.empty_like(code_OI).index_copy_(1, order, code_OI)
            group_I = torch.empty_like(group_I).index_copy_(0, order, group_I)
        zero_OG = torch.full_like(form.scale_OG, 1 << bits - 1) if form.zero_OG is None else form.zero_OG
        return {
            f"{name}.qweight": words(code_OI.T, bits, name),
            f"{name}.qzeros": words(zero_OG.to(torch.int64) - 1, bits, name).T.contiguous(),
            f"{name}.scales": form.scale_OG.T.to(torch.float16).contiguous(),
            f"{name}.g_idx": group_I,
        }

    def quantization_config(self, model: Written) -> dict[str, Any]:
        config = model.config
        return {
            "quant_method": "gptq",
            "checkpoint_format": "gptq",
            "bits": SCHEMES[config.schemes[0]].bits,
            "group_size": config.group or -1,
            "desc_act": config.act_order and not config.static_groups,
            "static_groups": config.act_order and config.static_groups,
            "sym": not config.zeros,
            "true_sequential": False,
            "damp_percent": config.damping,
            "lm_head": False,
            "dynamic": {f"-:{re.escape(name)}$": {} for name in model.kept},
        }


WRITER = Gptq()
