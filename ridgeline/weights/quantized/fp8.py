"""The method "fp8": E4M3 weights with one scale, or one for each block of 128 x 128 (DeepSeek, Qwen, AutoFP8), and
"fbgemm_fp8" with one for each output.

Legend:
    O  outputs
    I  inputs
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.kernels.base.weight_format import BLOCK, Activations, Fp8Format, Held
from ridgeline.weights.quantized.names import among
from ridgeline.weights.quantized.piece import (
    FLOATS,
    Piece,
    Section,
    Stored,
    Wanted,
    as_number,
    finite_scales,
    per_output,
)

SKIPPED = ("modules_to_not_convert", "ignored_layers", "ignore")


class Fp8:
    """See `Method`."""

    label = "FP8"
    tied = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        section = Section(config)
        self.skipped = section.names(*SKIPPED)
        self.static = section.choice("activation_scheme", ("static", "dynamic"), "dynamic") == "static"
        block = section.get("weight_block_size")
        if block is not None and block != [BLOCK, BLOCK]:
            raise section.wrong("weight_block_size", block, f"[{BLOCK}, {BLOCK}], the only one that we read, or absent")
        self.block = block is not None
        if (numbers := section.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
            raise section.wrong("fmt", numbers, "e4m3, the only one that we multiply")

    def piece(self, name: str, shape: tuple[int, ...], stored: Stored | None) -> Piece | None:
        if len(shape) != 2 or name == "lm_head" or among(name, self.skipped):
            return None
        # transformers says inverse of what one multiplies with, and activation for input
        theirs = self.block or f"{name}.activation_scale" in (stored or ())
        scale = _first(stored, f"{name}.weight_scale", f"{name}.weight_scale_inv", second=theirs)
        if self.block:
            return block_piece(name, shape, scale, "block")
        inverse = scale.endswith("_inv")
        x_scale = _first(stored, f"{name}.input_scale", f"{name}.activation_scale", second=inverse)
        return scaled_piece(name, shape, scale, "static" if self.static else "token", x_scale)


class Fbgemm(Fp8):
    """See `Method`. Scales are of outputs, and activations are rounded with a scale for each token."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__({**config, "activation_scheme": "dynamic", "weight_block_size": None})


def _first(stored: Stored | None, *names: str, second: bool = False) -> str:
    """Return the first of the names that the files have; without files or any of them the first (or second)."""
    found = [name for name in names if stored is not None and name in stored]
    return found[0] if found else names[second]


def scaled_piece(
    name: str, shape: tuple[int, ...], scale: str, activations: Activations | None, x_scale: str = ""
) -> Piece:
    """Return a weight with one scale, or one for each output. scale, x_scale: the names of the tensors."""
    outputs, inputs = shape
    tensors = {
        f"{name}.weight": Wanted(((outputs, inputs),), ("F8_E4M3",)),
        scale: Wanted(((), (1,), (1, 1), (outputs,), (outputs, 1)), FLOATS),
    }
    read = {
        "weight_OI": lambda files: files(f"{name}.weight"),
        "scale_SC": per_output(finite_scales(scale), outputs),
    }
    if activations == "static":
        tensors[x_scale] = Wanted(((), (1,)), FLOATS)
        read["x_scale"] = as_number(finite_scales(x_scale))
    held = Held(format=Fp8Format(activations=activations))
    return Piece(held=held, tensors=tensors, read=read, label="FP8")


def block_piece(name: str, shape: tuple[int, ...], scale: str, activations: Activations | None) -> Piece:
    """Return a weight with scales of blocks of 128 x 128, by row and column of the blocks, or as modelopt has them."""
    outputs, inputs = shape
    rows, columns = -(-outputs // BLOCK), -(-inputs // BLOCK)
    return Piece(
        held=Held(format=Fp8Format(block=True, activations=activations)),
        tensors={
            f"{name}.weight": Wanted(((outputs, inputs),), ("F8_E4M3",)),
            scale: Wanted(((rows, columns), (rows, 1, columns, 1)), FLOATS),
        },
        read={
            "weight_OI": lambda files: files(f"{name}.weight"),
            "scale_SC": lambda files: finite_scales(scale)(files).float().view(rows, columns),
        },
        label="FP8",
    )
