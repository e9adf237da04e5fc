"""The method "modelopt" of NVIDIA's Model Optimizer: FP8 and NVFP4, one for all modules or each module's own.

Its config is in config.json, or in hf_quant_config.json beside it, and names an algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.weights.quantized.four_bits import nvfp4_piece
from ridgeline.weights.quantized.fp8 import block_piece, scaled_piece
from ridgeline.weights.quantized.names import among
from ridgeline.weights.quantized.piece import Piece, Section, Stored

MIXED = "MIXED_PRECISION"
ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4")


class Modelopt:
    """See `Method`. Activations beside NVFP4 stay as they are."""

    label = "modelopt"
    tied = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        section = Section(config)
        only_cache = section.get("quant_algo") is None and section.get("kv_cache_quant_algo") is not None
        self.algorithm = None if only_cache else _algorithm(section, (*ALGORITHMS, MIXED))
        self.skipped = section.names("exclude_modules", "ignore")
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
        if stored is not None and f"{name}.pre_quant_scale" in stored:
            raise ModelLoadError(
                f"the checkpoint holds {name}.pre_quant_scale (NVFP4_AWQ), by which activations would be multiplied; "
                "export the model as NVFP4."
            )
        return nvfp4_piece(name, shape, f"{name}.weight", f"{name}.weight_scale_2", x_scale)


def _algorithm(section: Section, known: tuple[str, ...]) -> str:
    group = section.get("group_size", 16)
    name = section.get("quant_algo")
    if isinstance(name, str):  # modelopt writes some in small letters, such as fp8_pb_wo
        section = Section({**section.values, "quant_algo": name.upper()}, section.place)
    algorithm = section.choice("quant_algo", known)
    if algorithm == "NVFP4" and group != 16:
        raise section.wrong("group_size", group, "16")
    return algorithm
