"""The method "awq": 4-bit codes with zeros, packed along the outputs in the order of AutoAWQ's "gemm" kernels, or along
the inputs in their own order ("gemv").

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

from ridgeline.kernels.base.weight_format import CodedFormat, Held
from ridgeline.kernels.gemm.codes.op import unpacked
from ridgeline.weights.quantized.names import among
from ridgeline.weights.quantized.piece import (
    HALVES,
    Files,
    Piece,
    Read,
    Section,
    Stored,
    Wanted,
    check_divides,
    checked_scales,
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
        if not isinstance(version, str) or version.lower() not in ("gemm", "gemv"):
            raise section.wrong("version", version, "gemm or gemv, whose orders we read")
        self.by_input = version.lower() == "gemv"
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
        if self.by_input:
            width = _words_of_groups(groups, self.group)
            shapes = (outputs, inputs // 8), (outputs, 8 * width), (outputs, width)
        else:
            shapes = (inputs, outputs // 8), (groups, outputs), (groups, outputs // 8)
        wanted = zip(("qweight", "scales", "qzeros"), shapes, (("I32",), HALVES, ("I32",)), strict=True)
        return Piece(
            held=Held(
                format=CodedFormat(bits=4, group=self.group, zeros="levels" if self.zeros else "middle"),
                scales=dtype_of(stored, f"{name}.scales", "float16"),
            ),
            tensors={
                f"{name}.{part}": Wanted((wants,), dtypes, optional=part == "qzeros" and not self.zeros)
                for part, wants, dtypes in wanted
            },
            read=self._by_input(name, groups) if self.by_input else self._by_output(name),
            label="AWQ",
        )

    def _by_output(self, name: str) -> dict[str, Read]:
        read: dict[str, Read] = {
            "code_OB": lambda files: codes(files(f"{name}.qweight")),
            "scale_OG": lambda files: finite_scales(f"{name}.scales")(files).T,
        }
        return {**read, "zero_OG": lambda files: in_order(files(f"{name}.qzeros")).T} if self.zeros else read

    def _by_input(self, name: str, groups: int) -> dict[str, Read]:
        """Return readers of rows. Those of scales and zeros are filled up with zeros, to whole words."""
        scales = f"{name}.scales"

        def zeros(files: Files) -> Tensor:
            return unpacked(little_endian_bytes(files(f"{name}.qzeros")), 4)[:, :groups]

        read: dict[str, Read] = {
            "code_OB": lambda files: little_endian_bytes(files(f"{name}.qweight")),
            "scale_OG": lambda files: checked_scales(scales, files(scales)[:, :groups]),
        }
        return {**read, "zero_OG": zeros} if self.zeros else read


def _words_of_groups(groups: int, group: int) -> int:
    """Return the words that a row's zeros take in the order "gemv": whole ones for each 1,024 inputs."""
    several = {64: 2, 32: 4}.get(group, 1)
    return -(-groups // (8 * several)) * several


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
