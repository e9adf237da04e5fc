"""The schemes by which weights are held, one file each. A scheme prepares a loaded weight and multiplies with it.

A new scheme is a file with a `Scheme` and a line in the table.
"""

from __future__ import annotations

from ridgeline.core.registry import Registry

SCHEMES = Registry(
    "quantization",
    {
        "plain": "ridgeline.quantization.plain:PLAIN",
        "int8": "ridgeline.quantization.int8:INT8",
        "w8a8": "ridgeline.quantization.w8a8:W8A8",
        "fp8": "ridgeline.quantization.fp8:FP8",
        "fp8-block": "ridgeline.quantization.fp8:FP8_BLOCK",
        "w4a16": "ridgeline.quantization.w4a16:W4A16",
    },
)
