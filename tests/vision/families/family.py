"""A family's tiny model, and what many of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ridgeline.kernels.pictures.views import Patching

VOCAB = 320
IMAGE = 300  # the token in the place of a vector
MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_hidden_layers": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

VIT: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 64,
    "hidden_act": "silu",
}


TILES: dict[str, Any] = {
    "size": {"height": 32, "width": 32},
    "image_grid_pinpoints": [[32 * rows, 32 * columns] for rows in (1, 2) for columns in (1, 2, 3)],
}


@dataclass(frozen=True)
class Family:
    """config: of the whole model. patching: of its processor. sizes: of pictures that it takes, in pixels.

    padded: transformers takes pictures of several sizes as a padded batch, with their sizes.
    processor: transformers' processor of pixels and its settings, of a family that cuts pictures into tiles.
    chunk: the fewest tokens of a step beside three rows that decode.
    """

    name: str
    config: dict[str, Any]
    patching: Patching
    sizes: tuple[tuple[int, int], ...]
    padded: bool = False
    processor: tuple[type[Any], dict[str, Any]] | None = None
    chunk: int = 0

    @property
    def grids(self) -> bool:
        """True if positions have three axes."""
        return self.patching.merge > 1 and not self.padded
