"""A model's folder as a float32 decoder, and texts as windows of its tokens (for compression/predictions.py).

Legend:
    W  windows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.decoder import Decoder
from ridgeline.models.config import ModelConfig
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.training.objective import training_decoder
from ridgeline.weights.loader import load_weights, read_model_config
from ridgeline_bench.quality.documents import TextFile
from ridgeline_bench.quality.likelihood import prefix_token


@dataclass(frozen=True)
class DenseModel:
    """A model's folder, what it says, and its tokenizer."""

    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer
    device: torch.device

    @classmethod
    def of(cls, folder: Path, device: torch.device) -> DenseModel:
        return cls(folder, read_model_config(folder), Tokenizer.from_folder(folder), device)

    @property
    def prefix(self) -> int:
        """The token before a text."""
        return prefix_token(self.config, self.tokenizer)

    def decoder(self) -> Decoder:
        """Return the decoder in float32, newly loaded. Raise ModelLoadError."""
        decoder = training_decoder(self.config.spec, torch.float32, self.device)
        load_weights(decoder, self.folder, self.config.weights)
        return decoder.requires_grad_(False)

    def windows(self, files: Sequence[TextFile], context: int | None, most: int) -> Tensor:
        """Return windows of `context` + 1 tokens, of which all but the last are inputs: int64 [W, context + 1].

        Documents follow each other behind the prefix token. Raise InvalidConfig for a context that the model has not,
        or if there is not one window.
        """
        longest = self.config.spec.max_position_embeddings
        context = min(1024, longest) if context is None else context
        if not 2 <= context <= longest:
            raise InvalidConfig(f"the context is {context} tokens; this model's allows 2 to {longest}.")
        ids: list[int] = []
        for document in (document for file in files for document in file.documents):
            ids += [self.prefix, *self.tokenizer.encode(document, add_special_tokens=False)]
            if len(ids) > most * context:
                break
        count = min(most, (len(ids) - 1) // context)
        if count < 1:
            raise InvalidConfig(f"the texts have {len(ids)} tokens, and a window takes {context + 1}; name more.")
        rows = [ids[start : start + context + 1] for start in range(0, count * context, context)]
        return torch.tensor(rows, device=self.device)
