"""Marian (the translators of OPUS-MT): BART with positions that are computed from sines, and a bias of the scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.bart import DEFAULTS
from ridgeline.models.pegasus import Pegasus


class Marian(Pegasus):
    name = "MarianMTModel"
    before = False
    biased = True
    defaults: ClassVar = {**DEFAULTS, "vocab_size": 58101, "share_encoder_decoder_embeddings": True}

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        if not (shared := config.get("share_encoder_decoder_embeddings", True)):
            raise ModelLoadError(
                f"config.json sets share_encoder_decoder_embeddings to {shared!r}: the encoder has a vocabulary of its "
                "own, and a model has one tokenizer here; take one with a joint vocabulary."
            )
        return super().spec(config)
