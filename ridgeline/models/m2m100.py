"""M2M-100, NLLB-200: Pegasus with other sines; a token of the output's language comes first."""

from __future__ import annotations

from typing import ClassVar

from ridgeline.core.specs.model import Sines
from ridgeline.models.bart import DEFAULTS, OFFSET
from ridgeline.models.pegasus import Pegasus


class M2M100(Pegasus):
    name = "M2M100ForConditionalGeneration"
    defaults: ClassVar = {**DEFAULTS, "vocab_size": 128112, "activation_function": "relu", "scale_embedding": True}

    @staticmethod
    def positions(positions: int, width: int) -> tuple[int, int, Sines | None]:
        return positions + OFFSET, OFFSET, Sines(width / 2 - 1)
