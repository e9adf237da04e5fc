"""The method "modelopt" of NVIDIA's Model Optimizer: FP8, MXFP8, NVFP4 and four-bit integers, one for all modules or
each module's own.

Its config is in config.json, or in hf_quant_config.json beside it, and names an algorithm.

Legend:
    O  outputs
    I  inputs
    G  groups of a row
    V  values of a group
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.base.weight_format import CodedFormat, Held
from ridgeline.kernels.gemm.codes.op import MXFP8, packed
from ridgeline.kernels.gemm.codes.op import exponents as powers
from ridgeline.weights.quantized.four_bits import exponents, nvfp4_piece
from ridgeline.weights.quantized.fp8 import block_piece, scaled_piece
from ridgeline.weights.quantized.names import among
from ridgeline.weights.quantized.piece import (
    FLOATS,
    Files,
    Piece,
    Section,
    Stored,
    Wanted,
    check_divides,
    dtype_of,
    finite_scales,
    group_size,
    times_inputs,
)

MIXED, INT4 = "MIXED_PRECISION", "W4A16_AWQ"
FP8_KINDS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8")
ALGORITHMS = (*FP8_KINDS, "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "W4A16_AWQ")
GROUPS = {"NVFP4": 16, "NVFP4_AWQ": 16, "W4A16_NVFP4": 16, "MXFP8": 32}  # the only ones


class Modelopt:
    """See `Method`. Activations beside NVFP4 and MXFP8 stay as they are."""

    label = "modelopt"
    tied = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        section = Section(config)
        only_cache = section.get("quant_algo") is None and section.get("kv_cache_quant_algo") is not None
        self.algorithm = None if only_cache else _algorithm(section, (*ALGORITHMS, MIXED))
        self.skipped = section.names("exclude_modules", "ignore")
        self.group = group_size(section, "group_size", 128) if self.algorithm == INT4 else 128
        self.own: dict[str, str] = {}
        if self.algorithm == MIXED:
            layers = section.section("quantized_layers")
            if layers is None:
                raise section.wrong(
                    "quantized_layers", None, f"an object with each module's algorithm, as {MIXED} says"
                )
            for name in layers.values:
                layer = layers.section(name)
                if layer is None:
                    raise layers.wrong(name, None, "an object")
                self.own[name] = _algorithm(layer, ALGORITHMS)

    def piece(self, name: str, shape: tuple[int, ...], stored: Stored | None) -> Piece | None:
        algorithm = self.own.get(name) if self.algorithm == MIXED else self.algorithm
        if len(shape) != 2 or algorithm is None or among(name, self.skipped):
            return None
        scale, x_scale = f"{name}.weight_scale", f"{name}.input_scale"
        match algorithm:
            case "FP8":
                return scaled_piece(name, shape, scale, "static", x_scale)
            case "FP8_PER_CHANNEL_PER_TOKEN":
                return scaled_piece(name, shape, scale, "token")
            case "FP8_PB_WO":
                return block_piece(name, shape, scale, None)
            case "MXFP8":
                return mxfp8_piece(name, shape, scale)
            case "W4A16_AWQ":
                piece = int4_piece(name, shape, self._group_of(name, stored, shape[1]), scale, stored)
            case _:
                piece = nvfp4_piece(name, shape, f"{name}.weight", f"{name}.weight_scale_2", x_scale)
        factor = f"{name}.pre_quant_scale"
        return times_inputs(piece, factor, shape[1]) if stored is not None and factor in stored else piece

    def _group_of(self, name: str, stored: Stored | None, inputs: int) -> int:
        """Return the inputs of a group, by the scales if there are any: mixed configs have one for each module."""
        found = None if stored is None else stored.get(f"{name}.weight_scale")
        if found is None or len(found.shape) != 2 or not found.shape[1] or inputs % found.shape[1]:
            return self.group
        return inputs // found.shape[1]


def int4_piece(name: str, shape: tuple[int, ...], group: int, scale: str, stored: Stored | None) -> Piece:
    """Return a weight in signed integers of four bits, of which a byte holds those of two neighbouring outputs."""
    outputs, inputs = shape
    check_divides(name, inputs, group)
    groups = inputs // (group or inputs)

    def codes(files: Files) -> Tensor:
        bytes_OI = files(f"{name}.weight")
        both_OI = torch.stack((bytes_OI & 15, bytes_OI >> 4), dim=1).flatten(0, 1)
        return packed(both_OI ^ 8, 4)

    return Piece(
        held=Held(format=CodedFormat(bits=4, group=group), scales=dtype_of(stored, scale, "float32")),
        tensors={
            f"{name}.weight": Wanted(((outputs // 2, inputs),), ("U8",)),
            scale: Wanted(((outputs, groups),), FLOATS),
        },
        read={"code_OB": codes, "scale_OG": finite_scales(scale)},
        label="W4A16_AWQ",
    )


def mxfp8_piece(name: str, shape: tuple[int, ...], scale: str) -> Piece:
    """Return a weight in E4M3, of which 32 inputs share a power of two. Experts keep that form; other weights become
    plain numbers, since no other product takes such blocks."""
    outputs, inputs = shape
    check_divides(name, inputs, GROUPS["MXFP8"])

    def numbers(files: Files) -> Tensor:
        power_OG = powers(exponents(files(scale), scale))
        weight_OGV = files(f"{name}.weight").float().unflatten(1, (-1, GROUPS["MXFP8"]))
        return (weight_OGV * power_OG.unsqueeze(-1)).flatten(1)

    return Piece(
        held=Held(format=MXFP8, scales="uint8"),
        tensors={
            f"{name}.weight": Wanted(((outputs, inputs),), ("F8_E4M3",)),
            scale: Wanted(((outputs, inputs // GROUPS["MXFP8"]),), ("U8", "F8_E8M0")),
        },
        read={
            "code_OB": lambda files: files(f"{name}.weight").view(torch.uint8),
            "scale_OG": lambda files: exponents(files(scale), scale),
        },
        plain=numbers,
        label="MXFP8",
    )


def _algorithm(section: Section, known: tuple[str, ...]) -> str:
    name = section.get("quant_algo")
    if isinstance(name, str):  # modelopt writes some in small letters, such as fp8_pb_wo
        section = Section({**section.values, "quant_algo": name.upper()}, section.place)
    algorithm = section.choice("quant_algo", known)
    only = GROUPS.get(algorithm)
    if only is not None and (group := section.get("group_size", only)) != only:
        raise section.wrong("group_size", group, str(only))
    return algorithm
