"""Conversion of ggml's block formats to numbers.

Arithmetic is in float32, in the order that gives the same bits as ggml's own.

Legend:
    N  blocks
    B  bytes of a block
    V  values of a block
    G  groups of a block
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.kernels.gemm.codes.op import TABLES, exponents
from ridgeline.weights.blocks import BLOCKS, Blocks
from ridgeline.weights.formats.gguf_file import TensorType

AT_ONCE = 1 << 19  # values: temporaries stay in the processor's cache and are far smaller than the tensor

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dequantize(data_B: Tensor, type: TensorType) -> Tensor:
    """Return the values of a flat uint8 tensor, flat: in float32, or in the type itself if that is plain floats."""
    if type.name in _PLAIN:
        return data_B.view(_PLAIN[type.name])
    if type.name not in BLOCKS:
        raise ModelLoadError(f"tensors of type {type.name} cannot be dequantized; known: {', '.join(BLOCKS)}.")
    blocks_NB = data_B.view(-1, type.bytes)
    values_NV = torch.empty(len(blocks_NB), type.block)
    step = AT_ONCE // type.block
    for start in range(0, len(blocks_NB), step):
        part = slice(start, start + step)
        values_NV[part] = _values(BLOCKS[type.name], blocks_NB[part])
    return values_NV.view(-1)


def _values(kind: Blocks, b: Tensor) -> Tensor:
    how, scales = kind.format, kind.scales(b)
    scale_NG = _product(scales.outer_N1, scales.scale_NG)
    code_NGV = kind.codes(b).unflatten(1, (scale_NG.shape[1], -1))
    if how.values != "levels":
        value_NGV = torch.tensor(TABLES[how.values])[code_NGV.int()]
    else:
        value_NGV = code_NGV.float() - (1 << (how.bits - 1) if how.zeros == "middle" else 0)
    weight_NGV = scale_NG.unsqueeze(-1) * value_NGV
    if scales.minimum_NG is not None:
        weight_NGV = weight_NGV - _product(scales.outer_minimum_N1, scales.minimum_NG).unsqueeze(-1)
    return weight_NGV.flatten(1)


def _product(outer_N1: Tensor | None, inner_NG: Tensor) -> Tensor:
    if inner_NG.dtype == torch.uint8:
        return exponents(inner_NG)
    return inner_NG.float() if outer_N1 is None else outer_N1.float() * inner_NG.float()
