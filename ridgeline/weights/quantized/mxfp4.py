"""The method "mxfp4" of gpt-oss: the experts' stacks in blocks of 32 numbers that share a power of two. Other weights
are plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.kernels.base.weight_format import CodedFormat, Held
from ridgeline.weights.mxfp4 import GROUP_BYTES, MXFP4, dequantized
from ridgeline.weights.quantized.four_bits import exponents
from ridgeline.weights.quantized.piece import Piece, Stored, Wanted, check_divides

GROUP = 2 * GROUP_BYTES


class Mxfp4:
    """See `Method`."""

    label = MXFP4
    tied = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        pass

    def piece(self, name: str, shape: tuple[int, ...], stored: Stored | None) -> Piece | None:
        if len(shape) != 3:
            return None
        experts, outputs, inputs = shape
        check_divides(name, inputs, GROUP)
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        return Piece(
            held=Held(format=CodedFormat(bits=4, group=GROUP, values="e2m1"), scales="uint8"),
            tensors={
                blocks: Wanted(((experts, outputs, inputs // GROUP, GROUP_BYTES),), ("U8",)),
                scales: Wanted(((experts, outputs, inputs // GROUP),), ("U8",)),
            },
            read={
                "code_OB": lambda files: files(blocks).flatten(-2),
                "scale_OG": lambda files: exponents(files(scales), scales),
            },
            label=MXFP4,
            plain=lambda files: dequantized(files(blocks), files(scales)),
        )
