"""The method "awq": 4-bit codes with zeros, packed along the outputs in the order of AutoAWQ's "gemm" kernels.

Legend:
    O  outputs
    I  inputs
    G  groups of a row
    W  words of 32 bits
    B  bytes of a word
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.core.weight_format import CodedFormat, Held
from ridgeline.kernels.coded_gemm.op import unpacked
from ridgeline.weights.quantized.names import among
from ridgeline.weights.quantized.piece import (
    HALVES,
    Piece,
    Read,
    Section,
    Stored,
    Wanted,
    check_divides,
    dtype_of,
    finite_scales,
    group_size,
    little_endian_bytes,
)

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word of eight codes each of eight neighbouring outputs is


class Awq:
    """See `Method`."""

    label = "AWQ"
    tied = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        section = Section({**config, "bits": config.get("bits", config.get("w_bit"))})
        section.integer("bits", (4,))
        self.group = group_size(section, "group_size" if "group_size" in config else "q_group_size", 128)
        self.zeros = section.boolean("zero_point", True)
        version = section.get("version", "gemm")
        if not isinstance(version, str) or version.lower() != "gemm":
            raise section.wrong("version", version, "gemm, the only one whose order we read")
        self.skipped = section.names("modules_to_not_convert")
        self.lm_head = section.boolean("lm_head")

    def piece(self, name: str, shape: tuple[int, ...], stored: Stored | None) -> Piece | None:
        if len(shape) != 2 or (name == "lm_head" and not self.lm_head) or among(name, self.skipped):
            return None
        outputs, inputs = shape
        check_divides(name, inputs, self.group)
        if outputs % 8:
            return None  # which AWQ leaves as they are
        groups = inputs // (self.group or inputs)
        read: dict[str, Read] = {
            "code_OB": lambda files: codes(files(f"{name}.qweight")),
            "scale_OG": lambda files: finite_scales(f"{name}.scales")(files).T,
        }
        if self.zeros:
            read["zero_OG"] = lambda files: in_order(files(f"{name}.qzeros")).T
        return Piece(
            held=Held(
                format=CodedFormat(bits=4, group=self.group, zeros="levels" if self.zeros else "middle"),
                scales=dtype_of(stored, f"{name}.scales", "float16"),
            ),
            tensors={
                f"{name}.qweight": Wanted(((inputs, outputs // 8),), ("I32",)),
                f"{name}.scales": Wanted(((groups, outputs),), HALVES),
                f"{name}.qzeros": Wanted(((groups, outputs // 8),), ("I32",), optional=not self.zeros),
            },
            read=read,
            label="AWQ",
        )


def codes(words: Tensor) -> Tensor:
    """Return the plane of codes of words [I, W]: uint8 [O, I / 2]. Bytes of two neighbouring inputs give bytes of two
    outputs, so that codes need no bytes of their own."""
    bytes_IWB = little_endian_bytes(words).unflatten(-1, (-1, 4))
    even, odd = bytes_IWB[0::2], bytes_IWB[1::2]
    plane = torch.empty(len(even), words.shape[1], 8, dtype=torch.uint8)
    for byte in range(4):
        plane[..., PLACES.index(2 * byte)] = (even[..., byte] & 15) | odd[..., byte] << 4
        plane[..., PLACES.index(2 * byte + 1)] = even[..., byte] >> 4 | odd[..., byte] & 240
    return plane.flatten(1).T


def in_order(words: Tensor) -> Tensor:
    """Return the codes of words along the outputs: uint8 [..., O]."""
    return unpacked(little_endian_bytes(words), 4).unflatten(-1, (-1, 8))[..., PLACES].flatten(-2)
