"""Prompts that come as embeddings instead of tokens: one vector for each position, in the place of the embedding
table's rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.model_spec import ModelSpec

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PLACEHOLDER = 0  # stands for each position in the prompt's tokens, as in vLLM
MOST_BYTES = 48 << 20  # of one prompt: what the connection between the processes carries


@dataclass(frozen=True)
class Embeds:
    """The vectors of some positions: numbers of the type `dtype`, little-endian, `width` of them for each position."""

    dtype: str
    width: int
    data: bytes

    def __len__(self) -> int:
        return len(self.data) // self._stride

    def __getitem__(self, part: slice) -> Embeds:
        start, end, _ = part.indices(len(self))
        return Embeds(self.dtype, self.width, self.data[start * self._stride : max(start, end) * self._stride])

    @property
    def is_finite(self) -> bool:
        if self.dtype == "bfloat16":
            return not ((np.frombuffer(self.data, "<u2") & 0x7F80) == 0x7F80).any()  # the exponent of no number
        return bool(np.isfinite(np.frombuffer(self.data, "<f2" if self.dtype == "float16" else "<f4")).all())

    @property
    def _stride(self) -> int:
        return self.width * ITEM_BYTES[self.dtype]


def embeds_width(enabled: bool, spec: ModelSpec) -> int:
    """Return the width of vectors that prompts may be made of; 0: they may not. Raise InvalidConfig for a model that
    cannot take them."""
    if not enabled:
        return 0
    if spec.pooling is not None:
        raise InvalidConfig("enable_prompt_embeds is for models that generate; leave it out.")
    if spec.embedding_multiplier != 1:
        raise InvalidConfig(
            "enable_prompt_embeds: this model scales its embeddings, and nothing tells whether a prompt's are "
            "scaled already; leave it out."
        )
    return spec.hidden_size
