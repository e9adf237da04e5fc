"""Vectors and positions that plans bring for some tokens, in memory that the graphs of mixed steps read.

All these graphs share it, since they run one at a time. It is loaded before each step that brings some, and behind such
a step it is cleared, so that steps of texts alone replay the same graphs.

Legend:
    T  tokens of the largest step in a graph
    W  numbers of a vector, with those that are added behind layers
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.core.plan.buckets import MIXED_TOKENS
from ridgeline.core.plan.reserve import Reserved, StepSizes
from ridgeline.core.specs.coded import CodedTowerSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.layers.given import GivenPlaces, GivenPositions, GivenRows, GivenVectors, MaskedPlaces, MaskedRows


def parts_of_vector(model: ModelSpec) -> int:
    """Return the number of vectors of the model's width that may be given of a token, those behind layers included; 0:
    a graph takes none."""
    if not model.embeds or (model.tower is None and model.listener is None):
        return 0
    if model.tower is None or isinstance(model.tower, CodedTowerSpec):
        return 1
    return max(1, model.tower.outputs // model.hidden_size)


@dataclass(frozen=True)
class GivenMemory:
    """The memory of `GivenInputs`."""

    model: ModelSpec

    def reserve(self, sizes: StepSizes) -> Reserved:
        width = parts_of_vector(self.model) * self.model.hidden_size
        tokens = min(sizes.max_tokens, MIXED_TOKENS[-1]) if sizes.on_gpu and width else 0
        return Reserved(held=tokens * (width * sizes.itemsize + 3 * 8 + 1))


class GivenInputs:
    """tokens: of the largest step in a graph. axes: positions have three."""

    def __init__(self, model: ModelSpec, tokens: int, dtype: torch.dtype, device: torch.device, *, axes: bool) -> None:
        parts = parts_of_vector(model)
        self._width = model.hidden_size
        self._x_TW = torch.zeros(tokens if parts else 0, parts * self._width, dtype=dtype, device=device)
        self._given_T = torch.zeros(len(self._x_TW), dtype=torch.bool, device=device)
        columns = tokens if axes else 0
        self._places_3T = torch.full((3, columns), -1, dtype=torch.int64, device=device)
        self._loaded = self._placed = False

    def of(self, tokens: int) -> tuple[GivenVectors | None, GivenPositions | None]:
        """Return the vectors and positions that the graph of a step of so many tokens reads."""
        given: GivenVectors | None = None
        if len(self._x_TW):
            x_TM, *deep = self._x_TW[:tokens].split(self._width, dim=1)
            given = MaskedRows(self._given_T[:tokens], x_TM, deep)
        return given, MaskedPlaces(self._places_3T[:, :tokens]) if self._places_3T.numel() else None

    def holds(self, given: GivenRows | None, places: GivenPlaces | None) -> bool:
        """Return True if a graph can read these."""
        return (given is None or len(self._x_TW) > 0) and (places is None or self._places_3T.numel() > 0)

    def load(self, given: GivenRows | None, places: GivenPlaces | None) -> None:
        """Bring what a step has, which may be nothing. The step's graph holds it."""
        if given is not None or self._loaded:
            self._given_T.zero_()
        if given is not None:
            self._given_T.index_fill_(0, given.token_t, True)
            parts = given.x_tM, *given.deep
            for part, own_TM in enumerate(self._x_TW.split(self._width, dim=1)):
                if part < len(parts):
                    own_TM.index_copy_(0, given.token_t, parts[part].to(own_TM.dtype))
                else:  # a prompt's own vectors have no parts behind the first
                    own_TM.index_fill_(0, given.token_t, 0)
        if places is not None or self._placed:
            self._places_3T.fill_(-1)
        if places is not None:
            self._places_3T.index_copy_(1, places.token_t, places.places_3t)
        self._loaded, self._placed = given is not None, places is not None
