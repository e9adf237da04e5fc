"""Folders of compressed-tensors (https://github.com/vllm-project/compressed-tensors).

int-quantized, float-quantized   weight int8 or float8_e4m3fn [O, I], weight_scale float32 [O, 1]
pack-quantized                   weight_packed int32 [O, I · bits / 32], weight_scale [O, G], weight_shape int64 [2],
                                 weight_zero_point int32 [O · bits / 32, G]
mxfp4-pack-quantized             weight_packed uint8 [O, I / 2] (the first code in the low bits),
                                 weight_scale uint8 [O, I / 32], exponents with the bias 127
nvfp4-pack-quantized             the same with weight_scale float8_e4m3fn [O, I / 16] and weight_global_scale
                                 float32 [1], by which scales are divided
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.compression.made import Made
from ridgeline.compression.schemes import MakeConfig
from ridgeline.compression.writers import Written
from ridgeline.compression.writers.packing import nibbles, words
from ridgeline.kernels.gemm.codes.op import Coded
from ridgeline.kernels.gemm.fp8.op import Fp8
from ridgeline.kernels.gemm.plain.levels import Levels

_FORMATS = {
    "fp8": "float-quantized",
    "w8a8": "int-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
}


class CompressedTensors:
    def tensors(self, name: str, made: Made, dtype: torch.dtype) -> dict[str, Tensor]:
        form = made.form
        if isinstance(form, Fp8):
            return {f"{name}.weight": form.weight_OI, f"{name}.weight_scale": form.scale_SC}
        if isinstance(form, Levels):
            return {f"{name}.weight": form.level_OI, f"{name}.weight_scale": form.scale_O[:, None].contiguous()}
        return _floats(name, form) if form.format.values == "e2m1" else _packed(name, form, dtype)

    def quantization_config(self, model: Written) -> dict[str, Any]:
        schemes = sorted({made.scheme for made in model.made.values()})
        groups = {}
        for index, scheme in enumerate(schemes):
            names = [name for name, made in model.made.items() if made.scheme == scheme]
            groups[f"group_{index}"] = _group(scheme, ["Linear"] if len(schemes) == 1 else names, model.config)
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": groups["group_0"]["format"] if len(schemes) == 1 else "mixed-precision",
            "config_groups": groups,
            "ignore": ["lm_head", *model.kept],
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


def _packed(name: str, form: Coded, dtype: torch.dtype) -> dict[str, Tensor]:
    bits, code_OI = form.format.bits, form.codes()
    found = {f"{name}.weight_scale": form.scale_OG.to(dtype), f"{name}.weight_shape": torch.tensor(code_OI.shape)}
    if form.zero_OG is not None:
        found[f"{name}.weight_zero_point"] = words(form.zero_OG, bits, name)
    return {f"{name}.weight_packed": words(code_OI.T, bits, name).T.contiguous(), **found}


def _floats(name: str, form: Coded) -> dict[str, Tensor]:
    packed = nibbles(form.codes(), first_high=False)
    found = {f"{name}.weight_packed": packed, f"{name}.weight_scale": form.scale_OG}
    if form.scale is not None:
        found[f"{name}.weight_global_scale"] = (1 / form.scale.float()).reshape(1)
    return found


def _group(scheme: str, targets: list[str], config: MakeConfig) -> dict[str, Any]:
    weights: dict[str, Any]
    activations = None
    if scheme in ("fp8", "w8a8"):
        kind = "float" if scheme == "fp8" else "int"
        weights = _args(8, kind, "channel", None)
        activations = _args(8, kind, "token", None) | {"dynamic": True}
    elif scheme == "mxfp4":
        weights = _args(4, "float", "group", 32) | {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    elif scheme == "nvfp4":
        weights = _args(4, "float", "tensor_group", 16) | {"scale_dtype": "torch.float8_e4m3fn"}
    else:
        bits = 4 if scheme == "w4a16" else 8
        whole = scheme == "int8" or not config.group
        weights = _args(bits, "int", "channel" if whole else "group", None if whole else config.group)
        weights["symmetric"] = scheme == "int8" or not config.zeros
        if config.act_order and not whole:
            weights["actorder"] = "weight"  # the order in which columns were rounded; readers need not know it
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
        "format": _FORMATS.get(scheme, "pack-quantized"),
    }


def _args(bits: int, kind: str, strategy: str, group: int | None) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "group_size": group,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }


WRITER = CompressedTensors()
