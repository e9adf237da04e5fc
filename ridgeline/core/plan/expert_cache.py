"""Counts of a device's cache of experts whose matrices lie in the host's memory."""

from __future__ import annotations

from typing import NamedTuple


class ExpertCacheFigures(NamedTuple):
    """The counts of all layers since the engine started. An expert counts once for each step and layer that needs it.

    needed: experts that tokens went to. found: those of them that were on the device, or on their way, by then.
    foreseeable: needed experts of layers whose experts were predicted. foreseen: those of them that were predicted.
    copied: bytes that were copied to the device.
    """

    needed: int = 0
    found: int = 0
    foreseeable: int = 0
    foreseen: int = 0
    copied: int = 0

    def plus(self, other: ExpertCacheFigures) -> ExpertCacheFigures:
        return ExpertCacheFigures(*map(sum, zip(self, other, strict=True)))

    def __str__(self) -> str:
        return (
            f"{self.found / max(1, self.needed):.1%} of {self.needed:,} experts needed were on the device, "
            f"{self.foreseen / max(1, self.foreseeable):.1%} of {self.foreseeable:,} were foreseen, "
            f"{self.copied / 1e9:.2f} GB were copied"
        )
