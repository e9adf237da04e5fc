"""The method "bitsandbytes": int8 rows (LLM.int8), and NF4 or FP4 in blocks that may have their scales rounded too.

Legend:
    O  outputs
    I  inputs
    N  numbers of the weight, row by row
    A  blocks of the weight
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.kernels.base.weight_format import CodedFormat, Held, Values
from ridgeline.weights.quantized.names import among
from ridgeline.weights.quantized.piece import (
    FLOATS,
    Files,
    Piece,
    Section,
    Stored,
    Wanted,
    check_divides,
    checked_scales,
    finite_scales,
)

BLOCK, NESTED = 64, 256  # the library's own sizes, which no config changes
STATE_BYTES = 4096  # the most that a description in JSON may take


class Bitsandbytes:
    """See `Method`. Activations stay as they are, which is nearer to the truth than int8 with outliers."""

    label = "bitsandbytes"
    tied = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        section = Section(config)
        self.eight = section.boolean("load_in_8bit") or section.boolean("_load_in_8bit")
        four = section.boolean("load_in_4bit") or section.boolean("_load_in_4bit")
        if self.eight == four:
            raise section.wrong("load_in_4bit", four, "true, or load_in_8bit must, and not both")
        self.kind = section.choice("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        self.nested = section.boolean("bnb_4bit_use_double_quant")
        storage = section.get("bnb_4bit_quant_storage", "uint8")
        if four and storage != "uint8":
            raise section.wrong("bnb_4bit_quant_storage", storage, "uint8, the only one that we read")
        self.skipped = section.names("llm_int8_skip_modules") or ("lm_head",)

    def piece(self, name: str, shape: tuple[int, ...], stored: Stored | None) -> Piece | None:
        if len(shape) != 2 or among(name, self.skipped):
            return None
        return self._int8(name, shape) if self.eight else self._four(name, shape)

    def _int8(self, name: str, shape: tuple[int, ...]) -> Piece:
        outputs, inputs = shape
        return Piece(
            held=Held(format=CodedFormat(bits=8, group=0)),
            tensors={
                f"{name}.weight": Wanted(((outputs, inputs),), ("I8",)),
                f"{name}.SCB": Wanted(((outputs,),), FLOATS),
                f"{name}.weight_format": Wanted(((), (1,)), ("U8",), optional=True),
            },
            read={
                "code_OB": lambda files: files(f"{name}.weight").view(torch.uint8) ^ 128,
                "scale_OG": lambda files: finite_scales(f"{name}.SCB", zero=True)(files).float()[:, None] / 127,
            },
            label="bitsandbytes int8",
        )

    def _four(self, name: str, shape: tuple[int, ...]) -> Piece:
        outputs, inputs = shape
        check_divides(name, inputs, BLOCK)
        weight, count, kind = f"{name}.weight", outputs * inputs, self.kind
        values: Values = "nf4" if kind == "nf4" else "fp4"
        state = f"{weight}.quant_state.bitsandbytes__{kind}"
        blocks = count // BLOCK
        tensors = {
            weight: Wanted(((count // 2, 1),), ("U8",)),
            f"{weight}.absmax": Wanted(((blocks,),), ("U8",) if self.nested else ("F32",)),
            f"{weight}.quant_map": Wanted(((16,),), ("F32",)),
            state: Wanted(tuple((size,) for size in range(2, STATE_BYTES)), ("U8",)),
        }
        if self.nested:
            tensors[f"{weight}.nested_absmax"] = Wanted(((-(-blocks // NESTED),),), ("F32",))
            tensors[f"{weight}.nested_quant_map"] = Wanted(((256,),), ("F32",))

        def codes(files: Files) -> Tensor:
            _check_state(_state(files, state), state, kind, shape)
            bytes_N = files(weight).view(outputs, inputs // 2)
            return bytes_N << 4 | bytes_N >> 4  # the library has the first number in the high bits

        def scales(files: Files) -> Tensor:
            return _absmax(files, weight, state, self.nested).view(outputs, -1)

        return Piece(
            held=Held(format=CodedFormat(bits=4, group=BLOCK, values=values)),
            tensors=tensors,
            read={"code_OB": codes, "scale_OG": scales},
            label=f"bitsandbytes {kind}",
        )


def _absmax(files: Files, weight: str, state: str, nested: bool) -> Tensor:
    """Return the scale of each block, float32 [A]."""
    name = f"{weight}.absmax"
    if not nested:
        return checked_scales(name, files(name), zero=True)
    outer = checked_scales(f"{weight}.nested_absmax", files(f"{weight}.nested_absmax"), zero=True)
    offset = _state(files, state).get("nested_offset")
    if not isinstance(offset, (int, float)):
        raise ModelLoadError(f"{state} has no nested_offset; copy it again.")
    found = files(f"{weight}.nested_quant_map")[files(name).int()]
    found = found * outer.repeat_interleave(NESTED)[: len(found)] + offset
    return checked_scales(name, found, zero=True)


def _state(files: Files, name: str) -> dict[str, Any]:
    try:
        state = json.loads(bytes(files(name).tolist()))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{name} is no JSON ({error}); copy it again.") from error
    if not isinstance(state, dict):
        raise ModelLoadError(f"{name} is no JSON object; copy it again.")
    return state


def _check_state(state: Mapping[str, Any], name: str, kind: str, shape: tuple[int, ...]) -> None:
    """Raise ModelLoadError unless the file's own description says what we take for granted."""
    wanted = {"quant_type": kind, "blocksize": BLOCK, "shape": list(shape)}
    for entry, value in {**wanted, "nested_blocksize": NESTED}.items():
        if state.get(entry, value) != value:
            raise ModelLoadError(f"{name} says {entry} {str(state[entry])[:40]}, and {value} is the one that we read.")
