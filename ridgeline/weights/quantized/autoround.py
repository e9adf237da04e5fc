"""The method "auto-round" of Intel: codes packed as GPTQ's or AWQ's, with settings of their own for some modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.weights.quantized.awq import Awq
from ridgeline.weights.quantized.gptq import Gptq
from ridgeline.weights.quantized.names import pattern
from ridgeline.weights.quantized.piece import Method, Piece, Section, Stored

LESS_ONE = ("auto_round:auto_gptq", "auto_gptq", "auto_round:gptq")  # packed as the first version of GPTQ's format
AWQ = ("auto_round:auto_awq", "auto_awq", "auto_round:awq")
SYMMETRIC = ("auto_round", "auto_round:gptqmodel", "gptqmodel")  # versions differ in how they store zeros


class AutoRound:
    """See `Method`."""

    label = "AutoRound"
    tied = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        section = self.section = Section(config)
        packing = "packing_format" if section.get("packing_format") is not None else "backend"
        self.packing = section.choice(packing, (*LESS_ONE, *AWQ, *SYMMETRIC), LESS_ONE[0])
        blocks = section.get("block_name_to_quantize", section.get("to_quant_block_names"))
        names = blocks.split(",") if isinstance(blocks, str) else Section({"blocks": blocks}).names("blocks")
        self.blocks = tuple(name.strip() for name in names)
        extra = section.section("extra_config")
        self.own = {name: extra.section(name) for name in extra.values} if extra else {}
        self._reader(section)  # so that a wrong value is found at once

    def piece(self, name: str, shape: tuple[int, ...], stored: Stored | None) -> Piece | None:
        own = self._own(name)
        inside = not self.blocks or any(f"{name}.".startswith(f"{block}.") for block in self.blocks)
        if len(shape) != 2 or (own is None and (not inside or name == "lm_head")):
            return None
        section = Section({**self.section.values, **own.values}, own.place) if own else self.section
        if section.get("bits") == 16 or str(section.get("data_type", "int")) in ("float", "fp", "bf16", "fp16"):
            return None
        return self._reader(section).piece(name, shape, stored)

    def _own(self, name: str) -> Section | None:
        """Return the settings that a module has of its own, by its name or by a regular expression."""
        if (own := self.own.get(name)) is not None:
            return own
        expressions = (key for key in self.own if any(sign in key for sign in "*+[]()|^$\\"))
        return next((self.own[key] for key in expressions if pattern(key).fullmatch(name)), None)

    def _reader(self, section: Section) -> Method:
        section.choice("data_type", ("int",), "int")
        symmetric = section.boolean("sym", True)
        if not symmetric and self.packing in SYMMETRIC:
            raise section.wrong("sym", symmetric, f"true for what is packed as {self.packing}")
        values = {"bits": section.get("bits"), "group_size": section.get("group_size"), "lm_head": True}
        if self.packing in AWQ:
            return Awq({**values, "zero_point": not symmetric})
        return Gptq({**values, "sym": symmetric}, by_words=False)  # it stores a zero of 0 as if it were 1
