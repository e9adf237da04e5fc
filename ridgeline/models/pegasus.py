"""Pegasus: Like mBART, with positions that are computed from sines, and no norm behind the embeddings."""

from __future__ import annotations

from ridgeline.core.specs.model import Sines
from ridgeline.models.bart import MBart


class Pegasus(MBart):
    name = "PegasusForConditionalGeneration"
    embed_norm = False

    @staticmethod
    def positions(positions: int, width: int) -> tuple[int, int, Sines | None]:
        return positions, 0, Sines(width / 2)
