"""An adapter added to the weights that `ridgeline convert` writes.

Legend:
    I  inputs of a module
    O  outputs of a module
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.settings.adapters import MOST_RANK
from ridgeline.models.config import ModelConfig
from ridgeline.weights.adapters.places import adaptable
from ridgeline.weights.adapters.reader import ThinPair, read_adapter
from ridgeline.weights.loader import shortened


class MergedAdapter:
    """The products of an adapter, by the names of a checkpoint's tensors. Raise ModelLoadError as `read_adapter`."""

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        found = read_adapter(folder, adaptable(model.spec, model.weights), most_rank=MOST_RANK, dtype=torch.float32)
        self._pairs = {pair.place.source.name: pair for pair in found.pairs}
        self._missing = set(self._pairs)

    def added(self, name: str, make: Callable[[], Tensor]) -> Callable[[], Tensor] | None:
        """Return a function that makes a tensor with the adapter's product, float32, or None for a tensor that the
        adapter does not change."""
        pair = self._pairs.get(name)
        self._missing.discard(name)
        return None if pair is None else lambda: make().float() + _product(pair)

    def check(self) -> None:
        """Raise ModelLoadError unless all of the adapter's tensors were asked for."""
        if self._missing:
            raise ModelLoadError(
                f"the model's files lack weights that the adapter changes: {shortened(sorted(self._missing))}."
            )


def _product(pair: ThinPair) -> Tensor:
    """Return up · down as the checkpoint has the weight: [O, I], or [I, O] where it is stored so."""
    delta_OI = pair.place.in_their_order(pair.up_OR) @ pair.down_RI
    return delta_OI.T if pair.place.source.transpose else delta_OI
