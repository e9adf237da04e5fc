"""The method "quark" of AMD: FP8 and MXFP4, one scheme for all modules and others for some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.weights.quantized.four_bits import mxfp4_piece
from ridgeline.weights.quantized.fp8 import scaled_piece
from ridgeline.weights.quantized.names import among
from ridgeline.weights.quantized.piece import Piece, Section, Stored


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
        raise ModelLoadError(
            f"config.json's {weights.place} has weights in {str(weights.get('dtype'))[:40]} "
            f"{str(weights.get('qscheme'))[:40]}, which we do not read; known are fp8_e4m3 per_tensor and per_channel, "
            "and fp4 per_group of 32 with e8m0 scales."
        )
