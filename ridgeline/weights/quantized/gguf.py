"""GGUF's blocks as planes of codes, scales and minima, without rounding anything. The type of each tensor says how it
is quantized; there is no config.

Legend:
    O  outputs
    I  inputs
    R  rows of all matrices
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ridgeline.kernels.base.weight_format import Held
from ridgeline.kernels.gemm.codes.op import packed
from ridgeline.weights.blocks import BLOCKS
from ridgeline.weights.dequantize import AT_ONCE
from ridgeline.weights.quantized.four_bits import exponents
from ridgeline.weights.quantized.piece import Files, Piece, Read, Stored, Wanted, checked_scales
from ridgeline.weights.stored import StoredTensor


class Gguf:
    """See `Method`."""

    label = "GGUF"
    tied = True

    def piece(self, name: str, shape: tuple[int, ...], stored: Stored | None) -> Piece | None:
        tensor = None if stored is None else stored.get(f"{name}.weight")
        if tensor is None or tensor.dtype not in BLOCKS:
            return None
        how = BLOCKS[tensor.dtype].format
        read: dict[str, Read] = {"code_OB": lambda files: _codes(tensor, shape)}
        fields = {"scale_OG": 0}
        if how.zeros == "minimum":
            fields["zero_OG"] = 1
        if how.nested:
            fields["outer_OS"] = 2
            if how.zeros == "minimum":
                fields["outer_minimum_OS"] = 3
        for field, number in fields.items():
            read[field] = partial(_scales, tensor, f"{name}.weight", shape, number)
        return Piece(
            held=Held(format=how, scales="int8" if how.nested else BLOCKS[tensor.dtype].kept),
            tensors={f"{name}.weight": Wanted((shape,), (tensor.dtype,))},
            read=read,
            label=tensor.dtype,
            plain=lambda files: files(f"{name}.weight"),
        )


def _codes(tensor: StoredTensor, shape: tuple[int, ...]) -> Tensor:
    """Return the planes of codes, [..., O, B]."""
    kind, blocks_NB, inputs = BLOCKS[tensor.dtype], tensor.blocks(), shape[-1]
    per_row = len(blocks_NB) * inputs // torch.Size(shape).numel()
    some = max(1, AT_ONCE // inputs) * per_row
    rows = [packed(kind.codes(part).view(-1, inputs), kind.format.bits) for part in blocks_NB.split(some)]
    return torch.cat(rows).unflatten(0, shape[:-1])


def _scales(tensor: StoredTensor, name: str, shape: tuple[int, ...], number: int, files: Files) -> Tensor:
    """Return one of the tensors of scales, [..., O, G]. Raise ModelLoadError if one is no number."""
    found = BLOCKS[tensor.dtype].scales(tensor.blocks())[number]
    assert found is not None
    if found.dtype == torch.uint8:
        exponents(found, name)
    elif found.is_floating_point():
        checked_scales(name, found, above=False, zero=True)
    return found.reshape(*shape[:-1], -1)
