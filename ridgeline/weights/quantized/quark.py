"""The method "quark" of AMD: FP8, MXFP4 and four-bit integers, one scheme for all modules and others for some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.kernels.base.weight_format import CodedFormat, Held
from ridgeline.weights.quantized.awq import codes, in_order
from ridgeline.weights.quantized.four_bits import mxfp4_piece
from ridgeline.weights.quantized.fp8 import scaled_piece
from ridgeline.weights.quantized.names import among
from ridgeline.weights.quantized.piece import (
    FLOATS,
    Piece,
    Read,
    Section,
    Stored,
    Wanted,
    check_divides,
    dtype_of,
    finite_scales,
    group_size,
)


class Quark:
    """See `Method`. Activations beside MXFP4 stay as they are."""

    label = "Quark"
    tied = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        section = Section(config)
        overall = section.section("global_quant_config")
        if overall is None:
            raise section.wrong("global_quant_config", None, "an object with the scheme of the modules")
        layers = section.section("layer_quant_config")
        self.skipped = section.names("exclude")
        export = section.section("export")
        self.packing = "reorder" if export is None else export.get("pack_method", "reorder")
        self.overall = overall
        self.own: dict[str, Section] = {}
        for name in layers.values if layers else ():
            layer = layers.section(name) if layers else None
            if layer is not None:
                self.own[name] = layer

    def piece(self, name: str, shape: tuple[int, ...], stored: Stored | None) -> Piece | None:
        if len(shape) != 2 or among(name, self.skipped):
            return None
        scheme = next((own for key, own in self.own.items() if among(name, (key,))), self.overall)
        weights, inputs = scheme.section("weight"), scheme.section("input_tensors")
        if weights is None:
            return None
        scale = f"{name}.weight_scale"
        match weights.get("dtype"), weights.get("qscheme"):
            case "fp8_e4m3", "per_tensor" | "per_channel":
                if inputs is None:
                    return scaled_piece(name, shape, scale, None)
                dynamic = inputs.boolean("is_dynamic") or inputs.get("qscheme") != "per_tensor"
                return scaled_piece(name, shape, scale, "token" if dynamic else "static", f"{name}.input_scale")
            case "fp4", "per_group" if weights.get("group_size") == 32 and weights.get("scale_format") == "e8m0":
                return mxfp4_piece(name, shape, f"{name}.weight")
            case "int4" | "uint4" as dtype, "per_group" if self.packing == "reorder":
                return int4_piece(name, shape, weights, stored, signed=dtype == "int4")
        raise ModelLoadError(
            f"config.json's {weights.place} has weights in {str(weights.get('dtype'))[:40]} "
            f"{str(weights.get('qscheme'))[:40]}, which we do not read; known are fp8_e4m3 per_tensor and per_channel, "
            "fp4 per_group of 32 with e8m0 scales, and int4 and uint4 per_group packed with reorder."
        )


def int4_piece(name: str, shape: tuple[int, ...], weights: Section, stored: Stored | None, *, signed: bool) -> Piece:
    """Return a weight in integers of four bits, packed along the outputs in the order of AWQ's "gemm". Signed ones are
    in two's complement, and so are their zeros."""
    outputs, inputs = shape
    group = group_size(weights, "group_size", 128)
    check_divides(name, inputs, group)
    groups = inputs // (group or inputs)
    scale, zero = f"{name}.weight_scale", f"{name}.weight_zero_point"
    zeros = not signed or not weights.boolean("symmetric", True) or (stored is not None and zero in stored)
    sign = 0x88 if signed else 0  # both codes of a byte
    read: dict[str, Read] = {
        "code_OB": lambda files: codes(files(f"{name}.weight")) ^ sign,
        "scale_OG": lambda files: finite_scales(scale)(files).T,
    }
    tensors = {
        f"{name}.weight": Wanted(((inputs, outputs // 8),), ("I32",)),
        scale: Wanted(((groups, outputs),), FLOATS),
    }
    if zeros:
        tensors[zero] = Wanted(((groups, outputs // 8),), ("I32",))
        read["zero_OG"] = lambda files: (in_order(files(zero)) ^ (sign & 15)).T
    how = CodedFormat(bits=4, group=group, zeros="levels" if zeros else "middle")
    held = Held(format=how, scales=dtype_of(stored, scale, "bfloat16"))
    return Piece(held=held, tensors=tensors, read=read, label="Quark")
