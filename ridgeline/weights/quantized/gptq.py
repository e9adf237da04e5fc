"""The method "gptq": codes packed along the inputs, as AutoGPTQ and GPTQModel write them.

qweight is a little-endian stream of bits down each column. qzeros are packed likewise along the outputs; the first
version of the format stores them less 1. GPTQModel and AutoGPTQ subtract that from whole words, so a zero of 0 borrows
from the next ones in its word; zeros of 3 bits, which lie across words, are each taken by themselves. With act order
(`desc_act`) g_idx names the group of each input.

Legend:
    O  outputs
    I  inputs
    G  groups of a row
    W  words of 32 bits
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.kernels.base.weight_format import CodedFormat, Held
from ridgeline.kernels.gemm.codes.op import packed, unpacked
from ridgeline.weights.quantized.marlin import marlin_piece
from ridgeline.weights.quantized.names import among, pattern
from ridgeline.weights.quantized.piece import (
    HALVES,
    Files,
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

BITS = (2, 3, 4, 8)


class Gptq:
    """See `Method`.

    by_words: 1 was subtracted from whole words of zeros, and not from each zero.
    """

    label = "GPTQ"
    tied = False

    def __init__(self, config: Mapping[str, Any], *, by_words: bool = True) -> None:
        section, self.by_words = Section(config), by_words
        self.section = section
        form = section.choice("checkpoint_format", ("gptq", "gptq_v2", "marlin"), "gptq")
        self.less_one, self.marlin = form == "gptq", form == "marlin" or section.boolean("is_marlin_format")
        self.lm_head = section.boolean("lm_head")
        self.skipped = section.names("modules_to_not_convert")
        self.rules = self._rules()
        self._settings(section)  # so that a wrong value is found at once

    def _rules(self) -> list[tuple[bool, Any, Section]]:
        """Return GPTQModel's `dynamic`: (is it quantized, regular expression, what is other than elsewhere)."""
        dynamic = self.section.section("dynamic")
        found = []
        for key, changes in (dynamic.values if dynamic else {}).items():
            text, skip = str(key).removeprefix("+:"), str(key).startswith("-:")
            own = changes if isinstance(changes, Mapping) else {}
            section = Section({**self.section.values, **own}, f"quantization_config.dynamic.{key}")
            found.append((not skip, pattern(text.removeprefix("-:")), section))
        return found

    @staticmethod
    def _settings(section: Section) -> tuple[int, int, bool, bool]:
        """Return bits, group, symmetric, ordered."""
        return (
            section.integer("bits", BITS),
            group_size(section, "group_size", 128),
            section.boolean("sym", True),
            section.boolean("desc_act"),
        )

    def piece(self, name: str, shape: tuple[int, ...], stored: Stored | None) -> Piece | None:
        section = self.section
        if len(shape) != 2 or (name == "lm_head" and not self.lm_head) or among(name, self.skipped):
            return None
        for quantized, expression, own in self.rules:
            if expression.match(name):
                if not quantized:
                    return None
                section = own
                break
        bits, group, symmetric, ordered = self._settings(section)
        if self.marlin:
            if (bits, symmetric, ordered) != (4, True, False):
                raise section.wrong("checkpoint_format", "marlin", "gptq unless bits is 4, sym true and desc_act false")
            return marlin_piece(name, shape, group, stored)
        outputs, inputs = shape
        check_divides(name, inputs, group)
        if inputs * bits % 32 or outputs * bits % 32:
            return None  # which GPTQ leaves as they are
        groups = inputs // (group or inputs)
        how = CodedFormat(bits=bits, group=group, zeros="middle" if symmetric else "levels")
        tensors = {
            f"{name}.qweight": Wanted(((inputs * bits // 32, outputs),), ("I32",)),
            f"{name}.scales": Wanted(((groups, outputs),), HALVES),
            f"{name}.qzeros": Wanted(((groups, outputs * bits // 32),), ("I32",), optional=symmetric),
            f"{name}.g_idx": Wanted(((inputs,),), ("I32", "I64"), optional=not ordered),
        }
        read: dict[str, Read] = {
            "code_OB": lambda files: _codes(files, name, bits, group if ordered else None),
            "scale_OG": lambda files: finite_scales(f"{name}.scales")(files).T,
        }
        if not symmetric:
            read["zero_OG"] = lambda files: self._zeros(files(f"{name}.qzeros"), bits)
        if ordered:
            read["order_I"] = lambda files: order(files(f"{name}.g_idx"), group, f"{name}.g_idx")
        held = Held(format=how, scales=dtype_of(stored, f"{name}.scales", "float16"), ordered=ordered)
        return Piece(held=held, tensors=tensors, read=read, label="GPTQ")

    def _zeros(self, words_GW: Tensor, bits: int) -> Tensor:
        """Return the zeros of each output: uint8 [O, G]."""
        borrows = self.by_words and 32 % bits == 0
        if self.less_one and borrows:
            words_GW = words_GW + sum(1 << place for place in range(0, 32, bits))
        zeros_GO = stream(little_endian_bytes(words_GW), bits)
        if self.less_one and not borrows:
            zeros_GO = (zeros_GO + 1) & ((1 << bits) - 1)
        return zeros_GO.T


def _codes(files: Files, name: str, bits: int, ordered_group: int | None) -> Tensor:
    """Return the codes in planes, with columns in the order of their groups if there is such an order."""
    bytes_OB = little_endian_bytes(files(f"{name}.qweight").T)
    if ordered_group is None and bits != 3:
        return bytes_OB
    codes_OI = stream(bytes_OB, bits)
    if ordered_group is not None:
        codes_OI = codes_OI[:, order(files(f"{name}.g_idx"), ordered_group, f"{name}.g_idx").long()]
    return packed(codes_OI, bits)


def stream(bytes_B: Tensor, bits: int) -> Tensor:
    """Return the numbers of a stream of bits, the low ones first: uint8 [..., 8 · B / bits]."""
    if 8 % bits == 0:
        return unpacked(bytes_B, bits)
    single = unpacked(bytes_B, 1)
    single = single[..., : single.shape[-1] // bits * bits].unflatten(-1, (-1, bits))
    return sum((single[..., bit] << bit for bit in range(1, bits)), single[..., 0])


def order(group_I: Tensor, group: int, name: str) -> Tensor:
    """Return the inputs sorted by their groups, int32 [I]. Raise ModelLoadError unless groups are of one size."""
    inputs, group_I = len(group_I), group_I.long()
    each = group or inputs
    counts = torch.bincount(group_I.clamp(0, inputs), minlength=inputs // each)
    if (group_I < 0).any() or len(counts) != inputs // each or (counts != each).any():
        raise ModelLoadError(f"{name} does not put {each} inputs into each group; copy it again.")
    return torch.argsort(group_I, stable=True).int()
