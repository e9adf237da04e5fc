"""The quantization methods that checkpoints name: what their configs mean, and how their tensors become our forms.

A new method is a file with a `Method` and a line in the table.
"""

from __future__ import annotations

from ridgeline.core.registry import Registry

METHODS = Registry(
    "quantization method",
    {
        "fp8": "ridgeline.weights.quantized.fp8:Fp8",
        "fbgemm_fp8": "ridgeline.weights.quantized.fp8:Fbgemm",
        "compressed-tensors": "ridgeline.weights.quantized.compressed_tensors:CompressedTensors",
        "gptq": "ridgeline.weights.quantized.gptq:Gptq",
        "awq": "ridgeline.weights.quantized.awq:Awq",
        "bitsandbytes": "ridgeline.weights.quantized.bitsandbytes:Bitsandbytes",
        "mxfp4": "ridgeline.weights.quantized.mxfp4:Mxfp4",
        "modelopt": "ridgeline.weights.quantized.modelopt:Modelopt",
        "modelopt_fp4": "ridgeline.weights.quantized.modelopt:Modelopt",
        "auto-round": "ridgeline.weights.quantized.autoround:AutoRound",
        "intel/auto-round": "ridgeline.weights.quantized.autoround:AutoRound",
        "torchao": "ridgeline.weights.quantized.torchao:Torchao",
        "quark": "ridgeline.weights.quantized.quark:Quark",
    },
)
