"""Formats in which the weight of a linear map is held in fewer bits, as data. Their tensors are in kernels/gemm/fp8 and
kernels/gemm/codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.kernels.base.errors import InvalidConfig

BLOCK = 128  # inputs, and outputs, that share a scale in the block form of FP8
SUPER = 256  # inputs that share the scales of scales

Activations = Literal["token", "static", "block"]
Values = Literal["levels", "e4m3", "e2m1", "fp4", "nf4", "iq1", "iq2", "iq3", "iq3_s", "iq4"]
Zeros = Literal["middle", "levels", "minimum"]


@dataclass(frozen=True, kw_only=True)
class Fp8Format:
    """E4M3 numbers with float32 scales.

    block: a scale for each block of 128 outputs by 128 inputs; otherwise one for each output.
    activations: how a token's activations are rounded to E4M3. "token": with a scale from its own largest magnitude.
        "block": likewise for each 128 of its inputs. "static": with the scale that the checkpoint gives, where larger
        numbers saturate. None: they are not rounded.
    """

    block: bool = False
    activations: Activations | None = "token"

    def __post_init__(self) -> None:
        if self.block and self.activations not in ("block", None):
            raise InvalidConfig(f"FP8 weights in blocks need activations in blocks, got {self.activations!r}.")
        if not self.block and self.activations == "block":
            raise InvalidConfig("FP8 activations in blocks need weights in blocks.")


@dataclass(frozen=True, kw_only=True)
class CodedFormat:
    """Codes of a few bits, each group of which shares a scale. Activations stay as they are.

    weight = scale * value(code), or scale * (code - zero), or scale * code - minimum.

    bits: 2, 3, 4, 5, 6 or 8 bits of a code.
    group: neighbouring inputs that share a scale; 0: the whole row.
    values: the value of a code. "levels": the code as a number. "e4m3": a float of eight bits, of MXFP8, but NaN; an
        implementation may round activations beside it to E4M3, by blocks of 128 inputs. Others are tables of sixteen
        values: "e2m1" of MXFP4 and NVFP4, "fp4" of bitsandbytes, "nf4" of QLoRA, and "iq1" to "iq4" of GGUF's IQ types,
        for values or signed magnitudes.
    zeros: what is subtracted from levels. "middle": 2^(bits - 1). "levels": a whole number for each group. "minimum": a
        number for each group, in the weight's own units. Tables have none: "middle" then means nothing.
    nested: scales (and minima) are whole numbers, which every 256 inputs multiply by a float16 scale.
    """

    bits: int
    group: int
    values: Values = "levels"
    zeros: Zeros = "middle"
    nested: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 5, 6, 8):
            raise InvalidConfig(f"codes have 2, 3, 4, 5, 6 or 8 bits, not {self.bits!r}.")
        if self.group < 0 or self.group % 8:
            raise InvalidConfig(f"a group must be a multiple of 8 inputs, or 0 for a whole row, got {self.group!r}.")
        bits = 8 if self.values == "e4m3" else 4
        if self.values != "levels" and (self.bits != bits or self.zeros != "middle"):
            raise InvalidConfig(f"the table {self.values} is of {bits} bits and has no zeros.")

    def planes(self) -> tuple[int, ...]:
        """Return the widths in bits of the planes that hold the codes: the low bits, then the rest."""
        return {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}[self.bits]


@dataclass(frozen=True, kw_only=True)
class Int8Format:
    """Int8 levels with a scale for each output.

    rounds: activations are rounded to int8 too, token by token.
    """

    rounds: bool = True


WeightFormat = Fp8Format | CodedFormat | Int8Format

SCALE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1, "int8": 1}


@dataclass(frozen=True, kw_only=True)
class Held:
    """The form in which a weight lies in memory: its format, and what a format leaves to the file.

    scales: the dtype of the scales of codes, a key of SCALE_BYTES. "int8" if they are nested.
    factor: codes have a factor of the whole weight.
    ordered: the columns of codes may be in another order than the inputs.
    """

    format: WeightFormat
    scales: str = "float32"
    factor: bool = False
    ordered: bool = False

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a weight with its scales, without single numbers."""
        how = self.format
        if isinstance(how, Int8Format):
            return outputs * (inputs + 4)
        if isinstance(how, Fp8Format):
            scales = -(-outputs // BLOCK) * -(-inputs // BLOCK) if how.block else outputs
            return outputs * inputs + 4 * scales
        groups, scale = inputs // (how.group or inputs), SCALE_BYTES[self.scales]
        zero = {"middle": 0, "levels": 1, "minimum": scale}[how.zeros]
        outer = (4 if how.zeros == "minimum" else 2) * (inputs // SUPER) if how.nested else 0
        return outputs * (inputs * how.bits // 8 + groups * (scale + zero) + outer) + 4 * inputs * self.ordered


@dataclass(frozen=True, kw_only=True)
class HeldMatrix:
    """The matrix of a linear map, or a stack of them, in the forms of the files.

    helds: the form of each tensor of which the files make it up; None: plain numbers.
    rows: the outputs of each.
    copies: how many matrices a stack has.
    beside: the same numbers lie in memory as plain numbers too, since they are the embedding's table.
    """

    helds: tuple[Held | None, ...]
    rows: tuple[int, ...]
    inputs: int
    copies: int = 1
    beside: bool = False

    @property
    def numbers(self) -> int:
        return self.copies * sum(self.rows) * self.inputs

    def num_bytes(self, item: float) -> float:
        """Return its bytes, if a plain number has so many."""
        parts = zip(self.helds, self.rows, strict=True)
        return self.copies * sum(
            rows * self.inputs * item if held is None else held.num_bytes(rows, self.inputs) for held, rows in parts
        )
